//! What becomes of a turn whose run did not finish: one pure function of why it ended, which attempt it was, and what its
//! tool calls may have done to the world.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::state::{Effect, OperationStatus, RunOutcome};

/// Why a run ended without a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Cause {
    /// The handler said so, or panicked.
    Handler {
        /// For operators: kept with the run, never shown to the user, never logged.
        message: String,
        /// False: the next attempt would fail too.
        retryable: bool,
        /// Wait at least this long.
        retry_after: Option<Duration>,
    },
    /// The deadline of the turn passed.
    Timeout,
    /// The lease was lost: the process died, stood still, or was cut off.
    Expired,
    /// What the handler answered cannot be stored.
    RejectedContent {
        /// Which rule it broke; never the content.
        rule: String,
    },
    /// A shutdown gives the run back.
    Released,
    /// The run cannot be handed to a broker at all.
    Undeliverable {
        /// Which rule it broke.
        rule: String,
    },
}

/// Why the last attempt ended, as the user's error names it (`messages.error.kind`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The handler failed.
    Handler,
    /// The deadline passed.
    Timeout,
    /// The lease was lost.
    Crash,
    /// The answer could not be stored.
    RejectedContent,
    /// A side effect was started, and nobody knows whether it happened.
    SideEffectUnknown,
    /// The run ended after a side effect or at a shutdown, and may not be repeated.
    Interrupted,
    /// The user stopped it.
    Cancelled,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Handler,
        Self::Timeout,
        Self::Crash,
        Self::RejectedContent,
        Self::SideEffectUnknown,
        Self::Interrupted,
        Self::Cancelled,
    ];

    /// The text that the tables hold.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Handler => "handler",
            Self::Timeout => "timeout",
            Self::Crash => "crash",
            Self::RejectedContent => "rejected_content",
            Self::SideEffectUnknown => "side_effect_unknown",
            Self::Interrupted => "interrupted",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A tool call of the turn, of any of its runs, as far as the verdict asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The tool.
    pub name: String,
    /// What it does to the world.
    pub effect: Effect,
    /// How far it got.
    pub status: OperationStatus,
}

/// Everything that the verdict depends on besides the cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The attempt that ended, from 1.
    pub attempt: i32,
    /// Attempts a turn may have.
    pub max_attempts: i32,
    /// The user asked for the run to be stopped.
    pub cancel_requested: bool,
    /// Rows of the turn that are still there.
    pub rows: i64,
    /// The turn's operations.
    pub calls: Vec<Call>,
}

/// What settle writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The same rows again, after a backoff (`now` false) or at once.
    Retry {
        /// No backoff: the run was given back, it did not fail.
        now: bool,
        /// Wait at least this long.
        at_least: Duration,
    },
    /// A visible error.
    Fail {
        /// Why the last attempt ended.
        kind: Kind,
        /// All attempts are used up.
        exhausted: bool,
        /// A user's retry could succeed without doubling a known side effect.
        retryable: bool,
    },
    /// The messages were deleted: nothing is left to answer, and nothing is said.
    Void,
}

impl Cause {
    const fn kind(&self) -> Kind {
        match self {
            Self::Handler { .. } => Kind::Handler,
            Self::Timeout => Kind::Timeout,
            Self::Expired => Kind::Crash,
            Self::RejectedContent { .. } | Self::Undeliverable { .. } => Kind::RejectedContent,
            Self::Released => Kind::Interrupted,
        }
    }

    const fn is_final(&self) -> bool {
        match self {
            Self::Handler { retryable, .. } => !*retryable,
            Self::RejectedContent { .. } | Self::Undeliverable { .. } => true,
            Self::Timeout | Self::Expired | Self::Released => false,
        }
    }
}

/// Decides. In order: nothing left to answer, the user's wish, side effects, the cause itself, the cap.
#[must_use]
pub fn decide(cause: &Cause, standing: &Standing) -> Verdict {
    if standing.rows == 0 {
        return Verdict::Void;
    }
    if standing.cancel_requested {
        let retryable = side_effects(&standing.calls).is_none();
        return Verdict::Fail { kind: Kind::Cancelled, exhausted: false, retryable };
    }
    let exhausted = standing.attempt >= standing.max_attempts;
    if let Some(kind) = side_effects(&standing.calls) {
        return Verdict::Fail { kind, exhausted, retryable: false };
    }
    if cause.is_final() {
        return Verdict::Fail { kind: cause.kind(), exhausted, retryable: false };
    }
    if exhausted {
        return Verdict::Fail { kind: cause.kind(), exhausted, retryable: true };
    }
    match cause {
        Cause::Released => Verdict::Retry { now: true, at_least: Duration::ZERO },
        Cause::Handler { retry_after, .. } => {
            Verdict::Retry { now: false, at_least: retry_after.unwrap_or_default() }
        }
        _ => Verdict::Retry { now: false, at_least: Duration::ZERO },
    }
}

/// A turn with a side effect that may have happened is never run again: anything but a known failure counts.
fn side_effects(calls: &[Call]) -> Option<Kind> {
    let happened =
        |status| calls.iter().any(|call| call.effect == Effect::SideEffect && call.status == status);
    if happened(OperationStatus::Started) {
        Some(Kind::SideEffectUnknown)
    } else if happened(OperationStatus::Completed) {
        Some(Kind::Interrupted)
    } else {
        None
    }
}

/// How the ended run is recorded: a lost lease is `expired`, whatever follows.
#[must_use]
pub const fn run_outcome(cause: &Cause, verdict: &Verdict) -> RunOutcome {
    match (cause, verdict) {
        (Cause::Expired, _) => RunOutcome::Expired,
        (_, Verdict::Void | Verdict::Fail { kind: Kind::Cancelled, .. }) => RunOutcome::Cancelled,
        (Cause::Released, Verdict::Retry { .. }) => RunOutcome::Released,
        (_, Verdict::Retry { .. }) => RunOutcome::Retry,
        (_, Verdict::Fail { .. }) => RunOutcome::Error,
    }
}

#[cfg(test)]
mod tests;
