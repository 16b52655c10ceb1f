//! What a conversation waits for, in one sentence with who or what would end it.

use super::{super::output, sql::Conversation};

/// Seconds after which something that is usually over at once is worth a question.
pub(super) const NOT_YET_LATE: f64 = 3.0;

/// `None`: for its user.
pub(super) fn waits_for(of: &Conversation) -> Option<String> {
    let (agent, age) = (&of.agent, output::age(of.for_seconds));
    let until_due = of.wake_in_seconds.unwrap_or_default();
    let is_late = -until_due >= NOT_YET_LATE;
    Some(match of.status.as_str() {
        "waiting" | "retrying" if of.paused => {
            format!("its agent, which is paused: relay agent set {agent} paused=false")
        }
        "waiting" | "retrying" if is_late => {
            format!("a claim, due for {}: does a relay run?", output::age(-until_due))
        }
        "retrying" if until_due > 0.0 => {
            format!("its next attempt, in {}", output::age(until_due))
        }
        "waiting" | "retrying" => "a claim".to_owned(),
        "queued" if of.for_seconds >= NOT_YET_LATE => {
            format!(
                "a consumer, queued for {age} and nobody has begun it: does a consumer of {agent} run, and is it free?"
            )
        }
        "queued" => "a consumer".to_owned(),
        "thinking" => format!("the answer of {}", worker(of)),
        "recovering" => format!("a relay to recover it: {} was lost {age} ago", worker(of)),
        _ => return None,
    })
}

fn worker(of: &Conversation) -> String {
    of.worker.as_deref().map_or_else(|| "a consumer".to_owned(), |worker| output::shown(worker, super::SHOWN))
}

/// When somebody looks at the lane, by what that look is for.
pub(super) fn next_look(of: &Conversation) -> Option<(&'static str, String)> {
    let seconds = of.wake_in_seconds?;
    let is_over = seconds < 0.0;
    let age = output::age(seconds.abs());
    Some(match (of.status.as_str(), is_over) {
        ("thinking" | "recovering", false) => ("lease", format!("for {age}, unless it is renewed")),
        ("thinking" | "recovering", true) => ("lease", format!("over for {age}")),
        ("queued", false) => ("asked for", format!("in {age}, unless it is begun")),
        ("queued", true) => ("asked for", format!("due for {age}")),
        (_, false) => ("claim", format!("due in {age}")),
        (_, true) => ("claim", format!("due for {age}")),
    })
}
