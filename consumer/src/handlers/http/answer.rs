//! What an agent answered: a reply, and the operations that it made on its own. Everything in it is checked before
//! anything is recorded.

use serde_json::Value;
use shared::{sqlstate, state::Effect};

use crate::{
    handler::{HandlerError, Reply},
    operations::{OperationError, Operations},
    operations_api::fields::{self, Field, Misfit},
};

/// The body of a 200.
pub(super) struct Answer {
    reply: Reply,
    operations: Vec<Reported>,
}

/// An operation that has ended and was not recorded before it was made.
struct Reported {
    name: String,
    effect: Effect,
    input: Value,
    output: Value,
}

/// Reads `{reply: {content}, operations?: [{name, effect, input, output?}]}`; what else there is, is ignored.
pub(super) fn parse(body: &[u8]) -> Result<Answer, Misfit> {
    let mut answer = fields::parse(body)?;
    let content = answer.take("reply")?.into_object()?.take("content")?.into_text()?;
    let operations = match answer.optional("operations") {
        Some(operations) => operations.into_items()?.into_iter().map(reported).collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    Ok(Answer { reply: Reply::new(content), operations })
}

fn reported(item: Field) -> Result<Reported, Misfit> {
    let mut operation = item.into_object()?;
    Ok(Reported {
        name: operation.take("name")?.into_text()?,
        effect: operation.take("effect")?.into_word(fields::EFFECTS)?,
        input: operation.take("input")?.into_value(),
        output: operation.optional("output").map_or(Value::Null, Field::into_value),
    })
}

impl Answer {
    /// Records the operations, in order, and hands over the reply.
    pub(super) async fn record(self, operations: &Operations) -> Result<Reply, HandlerError> {
        // Their effects are in the world already: where one of them cannot be recorded, no other attempt may repeat them.
        let repeatable = self.operations.iter().all(|operation| operation.effect != Effect::SideEffect);
        for (index, Reported { name, effect, input, output }) in self.operations.iter().enumerate() {
            operations.report(name, *effect, input, output).await.map_err(|error| {
                let message = format!("operations[{index}] of the agent's answer was not recorded: {error}");
                match error {
                    OperationError::Rejected(_) => HandlerError::rejected(message),
                    OperationError::Database(refused) if sqlstate::is_rejected_content(&refused) => {
                        HandlerError::rejected(message)
                    }
                    _ if repeatable => HandlerError::retryable(message),
                    _ => HandlerError::fatal(message),
                }
            })?;
        }
        Ok(self.reply)
    }
}
