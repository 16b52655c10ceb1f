//! What a user reads when a turn failed: safe and useful, and never a handler's own words, which may quote anything.

use super::verdict::{Kind, Standing};
use crate::state::{Effect, OperationStatus};

/// The content of the error message.
pub(super) fn for_the_user(kind: Kind, standing: &Standing) -> String {
    let attempts = standing.attempt;
    match kind {
        Kind::Cancelled if !side_effects(standing).is_empty() => format!(
            "This request was cancelled, but an action may have taken effect: {}. Please check before you try again.",
            side_effects(standing)
        ),
        Kind::Cancelled => "This request was cancelled.".into(),
        Kind::SideEffectUnknown => format!(
            "The answer was interrupted while an action was under way, and it is not known whether it took effect: {}. \
             Nothing was repeated. Please check before you try again.",
            side_effects(standing)
        ),
        Kind::Interrupted if !side_effects(standing).is_empty() => format!(
            "The answer was interrupted after an action had taken effect: {}. Nothing was repeated.",
            side_effects(standing)
        ),
        Kind::Interrupted => "The answer was interrupted. You can try again.".into(),
        Kind::RejectedContent => "The agent's answer could not be stored.".into(),
        Kind::Timeout => format!("The agent did not answer in time{}. You can try again.", after(attempts)),
        Kind::Crash => format!("The agent stopped unexpectedly{}. You can try again.", after(attempts)),
        Kind::Handler => format!("The agent could not answer{}. You can try again.", after(attempts)),
    }
}

fn after(attempts: i32) -> String {
    if attempts > 1 { format!(" after {attempts} attempts") } else { String::new() }
}

/// The tools whose effect may be in the world.
fn side_effects(standing: &Standing) -> String {
    let mut names: Vec<&str> = standing
        .calls
        .iter()
        .filter(|call| call.effect == Effect::SideEffect && call.status != OperationStatus::Failed)
        .map(|call| call.name.as_str())
        .collect();
    names.dedup();
    names.join(", ")
}
