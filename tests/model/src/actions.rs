//! What can happen: a transaction that commits, a message that moves, or a fault.

use crate::state::{Lost, Trigger, TurnId};

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// An application, or a user through one, does something to a conversation.
    Application(u8, Wish),
    /// The time of a conversation's lane has come, and somebody looks at it.
    Lane(u8, Look),
    /// A relay goes on with what it has in memory, or loses it.
    Relay(Resume),
    /// A trigger moves, or does not.
    Trigger(Trigger, Move),
    /// The consumer in this place goes on.
    Consumer(usize, Work),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    SubmitOpens,
    SubmitCommits,
    SubmitRollsBack,
    CancelTurn,
    DeleteMessage(usize),
    EraseMessage(usize),
    RetryTurn(TurnId),
    MarkRead(u8),
    DeleteConversation,
    /// Only without the lane's lock: the operations go first, and the rest later.
    DeleteOperations,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    Claim,
    /// Only without the claim's lock: a lane is found to be due, and claimed later.
    FindDue,
    CloseEmptyLane,
    AskForQueued,
    FindLost(Lost),
    LeaseEnds,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    ClaimWhatWasDue,
    SendAgain,
    Recover,
    Crash,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Move {
    Publish,
    PublishTimesOut,
    PublishIsImpossible,
    GiveBack,
    ArrivesLate,
    Vanishes,
    IsForgotten,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    Receive(Trigger),
    FindQueued(u8),
    Begin {
        acked: bool,
    },
    ClaimAndBegin(u8),
    StartOperation,
    /// Only without the operation's lock: the insert that follows the check.
    InsertOperation,
    CallTool {
        acts: bool,
    },
    EndOperation,
    /// Only with an old snapshot: it looks for free rows before it has the locks.
    FinishLooks,
    Finish,
    FinishUnanswered {
        committed: bool,
    },
    FinishAgain,
    SettleFenced,
    HandlerFails,
    DeadlinePasses,
    CancelIsSeen,
    Leave,
    HandlerIsDropped,
    Heartbeat,
    Crash,
}
