//! Tool calls: an effect is recorded before it happens. The record is refused once the run has lost its lane or the user
//! has cancelled it, so a handler that goes through here starts nothing after its turn was given to somebody else.

use std::{fmt, sync::Arc};

use serde_json::Value;
use shared::{
    failpoint,
    ids::{ConversationId, IdempotencyKey, OperationId, RunId, TurnId},
    sqlstate,
    state::{Effect, OperationStatus},
};
use sqlx::PgPool;

use calls::Calls;

mod calls;

/// The longest input or output of an operation, in bytes of JSON.
pub const MAX_JSON_BYTES: usize = 256 * 1024;
/// The longest name of a tool, in bytes.
pub const MAX_NAME_BYTES: usize = 200;

/// Why an operation was not recorded.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// The run has lost its lane, was cancelled, or its conversation was deleted: stop, and call no tool.
    #[error("the run has lost its lane")]
    LaneLost,
    /// Name, input or output break a rule.
    #[error("{0}")]
    Rejected(&'static str),
    /// There is no started operation of this run with this id.
    #[error("this run has no such started operation")]
    NotStarted,
    /// Postgres could not be asked: nobody knows whether it was recorded, so call no tool.
    #[error("the operation could not be recorded: {}", sqlstate::safe_text(.0))]
    Database(#[from] sqlx::Error),
    /// A failpoint.
    #[error(transparent)]
    Failpoint(#[from] failpoint::Hit),
}

/// The operations of one run. Cheap to clone.
#[derive(Clone)]
pub struct Operations(Arc<Inner>);

struct Inner {
    pool: PgPool,
    conversation_id: ConversationId,
    turn_id: TurnId,
    run_id: RunId,
    calls: Calls,
}

impl fmt::Debug for Operations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operations").field("run_id", &self.0.run_id).finish_non_exhaustive()
    }
}

/// A recorded tool call that has not ended yet.
#[derive(Debug, Clone)]
#[must_use = "an operation that is never ended counts as started: its effect is unknown"]
pub struct Operation {
    operations: Operations,
    /// Its id.
    pub id: OperationId,
    /// Give this to the tool: equal for the same call in every attempt of the turn, new after a user's retry.
    pub idempotency_key: IdempotencyKey,
}

impl Operations {
    /// The operations of this run.
    #[must_use]
    pub fn new(pool: PgPool, conversation_id: ConversationId, turn_id: TurnId, run_id: RunId) -> Self {
        Self(Arc::new(Inner { pool, conversation_id, turn_id, run_id, calls: Calls::default() }))
    }

    /// Records that `tool` is about to be called. Only after `Ok` may it be called.
    pub async fn start(
        &self,
        tool: &str,
        effect: Effect,
        input: &Value,
    ) -> Result<Operation, OperationError> {
        failpoint::reach("before_op_start").await?;
        let operation = self.insert(tool, effect, input, None).await?;
        failpoint::reach("after_op_start").await?;
        Ok(operation)
    }

    /// Records a call that a remote handler made on its own and reports with its reply.
    pub async fn report(
        &self,
        tool: &str,
        effect: Effect,
        input: &Value,
        output: &Value,
    ) -> Result<(), OperationError> {
        let _ended = self.insert(tool, effect, input, Some(output)).await?;
        Ok(())
    }

    /// Records how a call ended, by its id.
    pub async fn end(
        &self,
        id: OperationId,
        status: OperationStatus,
        output: &Value,
    ) -> Result<(), OperationError> {
        if status == OperationStatus::Started {
            return Err(OperationError::Rejected("status must be completed or failed"));
        }
        failpoint::reach("after_tool").await?;
        let output = storable(output, "output")?;
        let mut transaction = self.0.pool.begin().await?;
        let ended = sqlx::query!(
            r#"
            update operations
            set status = $3, output = $4, ended_at = clock_timestamp()
            where id = $1 and run_id = $2 and status = 'started'
            "#,
            id as OperationId,
            self.0.run_id as RunId,
            status.as_str(),
            output,
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        failpoint::reach("after_op_end").await?;
        match ended.rows_affected() {
            0 => Err(OperationError::NotStarted),
            _ => Ok(()),
        }
    }

    /// How far an operation of this run got; `None`: there is no such operation.
    pub async fn status(&self, id: OperationId) -> Result<Option<OperationStatus>, OperationError> {
        let status = sqlx::query_scalar!(
            r#"select status as "status: OperationStatus" from operations where id = $1 and run_id = $2"#,
            id as OperationId,
            self.0.run_id as RunId,
        )
        .fetch_optional(&self.0.pool)
        .await?;
        Ok(status)
    }

    async fn insert(
        &self,
        tool: &str,
        effect: Effect,
        input: &Value,
        output: Option<&Value>,
    ) -> Result<Operation, OperationError> {
        if tool.is_empty() || tool.len() > MAX_NAME_BYTES || tool.contains('\0') {
            return Err(OperationError::Rejected("name must have 1 to 200 bytes, without NUL"));
        }
        let input = storable(input, "input")?;
        let output = output.map(|output| storable(output, "output")).transpose()?;
        let canonical = input.to_string();
        let key = |nth| IdempotencyKey::derive(self.0.turn_id, tool, &canonical, nth);
        let place = self.0.calls.reserve(key(0));
        let (id, idempotency_key) = (OperationId::fresh(), key(place.nth));
        let status = if output.is_some() { OperationStatus::Completed } else { OperationStatus::Started };
        let mut transaction = self.0.pool.begin().await?;
        let recorded = sqlx::query!(
            r#"
            with lane as (
                -- shared: a recovery of this run waits for this transaction, and sees the operation in its next statement
                select l.turn_id from agent_lanes l
                where l.conversation_id = $1
                  and l.run_id = $2
                  and l.state = 'running'
                  and not l.cancel_requested
                for share
            )
            insert into operations
                (id, run_id, turn_id, conversation_id, ordinal, name, effect, status, idempotency_key, input, output,
                 ended_at)
            select $3, $2, lane.turn_id, $1, $4, $5, $6, $7, $8, $9, $10,
                   case when $7 <> 'started' then clock_timestamp() end
            from lane
            "#,
            self.0.conversation_id.as_str(),
            self.0.run_id as RunId,
            id as OperationId,
            place.ordinal,
            tool,
            effect.as_str(),
            status.as_str(),
            idempotency_key as IdempotencyKey,
            input,
            output,
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        if recorded.rows_affected() == 0 {
            return Err(OperationError::LaneLost);
        }
        place.keep();
        Ok(Operation { operations: self.clone(), id, idempotency_key })
    }
}

impl Operation {
    /// The tool answered.
    pub async fn complete(self, output: &Value) -> Result<(), OperationError> {
        self.operations.end(self.id, OperationStatus::Completed, output).await
    }

    /// The tool is known to have done nothing.
    pub async fn fail(self, output: &Value) -> Result<(), OperationError> {
        self.operations.end(self.id, OperationStatus::Failed, output).await
    }
}

/// JSON as Postgres takes it: bounded, and NUL replaced by U+FFFD. Objects print their keys in order, so equal inputs
/// have equal texts.
fn storable(json: &Value, field: &'static str) -> Result<Value, OperationError> {
    let json = without_nul(json);
    if json.to_string().len() > MAX_JSON_BYTES {
        return Err(OperationError::Rejected(match field {
            "input" => "input must have at most 256 KiB",
            _ => "output must have at most 256 KiB",
        }));
    }
    Ok(json)
}

fn without_nul(json: &Value) -> Value {
    match json {
        Value::String(text) => Value::String(text.replace('\0', "\u{fffd}")),
        Value::Array(items) => items.iter().map(without_nul).collect(),
        Value::Object(fields) => {
            fields.iter().map(|(key, value)| (key.replace('\0', "\u{fffd}"), without_nul(value))).collect()
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_inputs_have_equal_texts_whatever_the_order_of_their_keys() {
        let a: Value = serde_json::from_str(r#"{"b": 1, "a": {"d": [1, 2], "c": null}}"#).unwrap();
        let b: Value = serde_json::from_str(r#"{"a": {"c": null, "d": [1, 2]}, "b": 1}"#).unwrap();
        assert_eq!(a.to_string(), b.to_string());
    }

    #[test]
    fn nul_is_cleaned_wherever_it_hides_and_size_is_bounded() {
        let cleaned = storable(&json!({"a\0": ["x\0y"]}), "input").unwrap();
        assert_eq!(cleaned, json!({"a\u{fffd}": ["x\u{fffd}y"]}));
        assert!(storable(&json!("x".repeat(MAX_JSON_BYTES)), "output").is_err());
    }
}
