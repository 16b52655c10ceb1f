//! The states and outcomes that the tables hold, as enums: what SQL says in text, Rust says in types.

use serde::{Deserialize, Serialize};

macro_rules! text_enums {
    ($($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::Type)]
        #[serde(rename_all = "snake_case")]
        #[sqlx(type_name = "text", rename_all = "snake_case")]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// The text that the tables hold.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    )*};
}

text_enums! {
    /// What a lane is doing now (`agent_lanes.state`).
    LaneState {
        /// Nothing to do.
        Idle = "idle",
        /// Rows are pending; due at `wake_at`.
        Waiting = "waiting",
        /// Claimed for a run whose trigger is with the broker.
        Queued = "queued",
        /// A consumer holds the lease.
        Running = "running",
    }
    /// Where an outbox row stands (`agent_outbox.status`).
    RowStatus {
        /// To be answered.
        Pending = "pending",
        /// Assigned to the run in flight.
        Processing = "processing",
        /// Answered by a reply.
        Done = "done",
        /// Ended by a visible error.
        Error = "error",
    }
    /// Who speaks (`messages.role`).
    Role {
        /// The user.
        User = "user",
        /// The agent.
        Assistant = "assistant",
        /// The system, telling that a turn failed.
        Error = "error",
    }
    /// How a run ended (`agent_runs.outcome`).
    RunOutcome {
        /// Its reply was committed.
        Done = "done",
        /// It failed, and its turn is tried again.
        Retry = "retry",
        /// It failed, and the user sees it.
        Error = "error",
        /// The user stopped it, or nothing was left to answer.
        Cancelled = "cancelled",
        /// Its lease was lost.
        Expired = "expired",
        /// A shutdown gave it back.
        Released = "released",
    }
    /// What a tool call does to the world (`operations.effect`).
    Effect {
        /// Changes nothing.
        Read = "read",
        /// May be repeated with the same idempotency key.
        Idempotent = "idempotent",
        /// Must not be repeated.
        SideEffect = "side_effect",
    }
    /// How far a tool call got (`operations.status`).
    OperationStatus {
        /// Recorded; the tool may have been called.
        Started = "started",
        /// The tool answered.
        Completed = "completed",
        /// The tool is known to have done nothing.
        Failed = "failed",
    }
}
