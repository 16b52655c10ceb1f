//! A turn as the agent gets it, and what the agent does about it: it calls its model, and each tool only after that is on
//! record.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Outside, ToolEffect};

/// A turn as the agent gets it.
#[derive(Clone)]
pub(crate) struct Asked {
    pub(crate) turn: Value,
    pub(super) outside: Outside,
}

impl Asked {
    /// A field of the turn.
    pub(crate) fn told(&self, field: &str) -> Result<&str> {
        self.turn[field].as_str().with_context(|| format!("the agent is not told its {field}"))
    }

    pub(crate) fn id(&self, field: &str) -> Result<Uuid> {
        Ok(self.told(field)?.parse()?)
    }

    pub(crate) fn is_first_attempt(&self) -> bool {
        self.turn["attempt"] == 1
    }

    /// One of the messages to be answered says so.
    pub(crate) fn is_told(&self, content: &str) -> bool {
        let messages = self.turn["messages"].as_array();
        messages
            .is_some_and(|all| all.iter().any(|said| said["in_turn"] == true && said["content"] == content))
    }

    /// Remembers the call; it must belong to a counted attempt, and follow no other run's side effect.
    pub(super) async fn call_model(&self) -> Result<()> {
        let (turn, run) = (self.id("turn_id")?, self.id("run_id")?);
        self.outside.memory().calls.push((self.told("conversation_id")?.to_owned(), run));
        let (counted, late): (bool, bool) = sqlx::query_as(
            "select exists (select from audit_runs where run_id = $1 and attempt = $2),
                    exists (select from audit_operations o where turn_id = $3 and run_id <> $1
                        and effect = 'side_effect' and not exists (
                            select from audit_operations f where f.id = o.id and f.status = 'failed'))",
        )
        .bind(run)
        .bind(i32::try_from(self.turn["attempt"].as_i64().unwrap_or_default())?)
        .bind(turn)
        .fetch_one(&self.outside.0.pool)
        .await?;
        let mut memory = self.outside.memory();
        if !counted {
            memory.broken.push(format!("the model was called in {run}, which no attempt counts"));
        }
        if late {
            memory.broken.push(format!("the model was called in {run}, after another run's side effect"));
        }
        Ok(())
    }

    /// Records a call, and only then acts; says afterwards that it is done. `None`: it was refused.
    pub(crate) async fn act(&self, name: &str, effect: &str, input: Value) -> Result<Option<Value>> {
        let Some(operation) = self.begin_to_act(name, effect, input).await? else { return Ok(None) };
        // The consumer may be gone; what is done is done.
        let _told = self.end(&operation["id"], json!({ "status": "completed", "output": "done" })).await;
        Ok(Some(operation))
    }

    /// Records a call, and only then acts; leaves it open.
    pub(crate) async fn begin_to_act(&self, name: &str, effect: &str, input: Value) -> Result<Option<Value>> {
        let (turn_id, run_id) = (self.id("turn_id")?, self.id("run_id")?);
        let call = format!("{name} {input}");
        let (status, operation) = self.start(name, effect, input).await?;
        if status != 201 {
            self.outside.memory().refused.push((run_id, status));
            return Ok(None);
        }
        let id: Uuid = operation["id"].as_str().context("no id")?.parse()?;
        let key = operation["idempotency_key"].as_str().context("no key")?.to_owned();
        let started = sqlx::query_scalar("select exists (select from audit_operations where id = $1)");
        let started: bool = started.bind(id).fetch_one(&self.outside.0.pool).await?;
        let mut memory = self.outside.memory();
        if !started {
            memory.broken.push(format!("the tool was called in {run_id} before that was committed"));
        }
        memory.effects.push(ToolEffect { turn_id, run_id, effect: effect.into(), call, key });
        drop(memory);
        Ok(Some(operation))
    }

    /// Records an operation.
    pub(crate) async fn start(&self, name: &str, effect: &str, input: Value) -> Result<(u16, Value)> {
        let call = json!({ "name": name, "effect": effect, "input": input });
        self.send(self.outside.0.client.post(self.told("operations_url")?).json(&call)).await
    }

    /// Records how it ended.
    pub(crate) async fn end(&self, operation: &Value, how: Value) -> Result<(u16, Value)> {
        let (url, id) = (self.told("operations_url")?, operation.as_str().context("no id")?);
        self.send(self.outside.0.client.patch(format!("{url}/{id}")).json(&how)).await
    }

    /// Records an operation of which this is the whole body.
    pub(crate) async fn start_raw(&self, body: String) -> Result<(u16, Value)> {
        self.send(self.outside.0.client.post(self.told("operations_url")?).body(body)).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<(u16, Value)> {
        let response = request.bearer_auth(self.told("operations_token")?).send().await?;
        Ok((response.status().as_u16(), response.json().await?))
    }
}
