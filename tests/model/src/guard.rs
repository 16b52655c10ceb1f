//! The guards of the protocol, one by one: each can be left out, and the checker then shows what it is there for.

/// A condition, a lock or an order of things that the real code has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guard {
    // Submit.
    /// `submit_message` leaves a lane that is queued or running alone.
    SubmitSparesFlight,
    /// `submit_message` leaves a lane that waits for another attempt alone.
    SubmitSparesRetry,

    // Claim.
    /// The claim locks the lanes whose rows it reads and which it changes.
    ClaimLocks,
    /// A retry takes the rows of the lane's own turn and no others.
    ClaimOwnRows,
    /// A turn's rows are of one generation.
    ClaimOneGeneration,
    /// The attempt is counted by the claim, before anything is started.
    AttemptCountedFirst,
    /// Whether a due lane without rows is idle is decided under the conversation's lock.
    EmptyLaneLocks,

    // Publish, release, look after.
    /// Each dispatch of a run has a message id of its own.
    DispatchInMessageId,
    /// A trigger that the broker does not hold is sent again.
    Redispatch,
    /// Only a run that is still queued is given back.
    ReleaseOnlyQueued,
    /// A claim that is given back costs no attempt.
    ReleaseReturnsAttempt,

    // Begin.
    /// Only a run that is still queued begins.
    BeginOnlyQueued,
    /// A trigger is acknowledged when its run has begun or is over.
    AckAfterBegin,

    // Operations.
    /// An operation is recorded before its tool is called.
    RecordBeforeCall,
    /// An operation starts only while its run holds the lane.
    OperationFence,
    /// The lane stays locked from the fence to the operation's insert.
    OperationLocksLane,
    /// An operation does not start once a cancellation was requested.
    OperationObeysCancel,

    // Finish.
    /// A reply is committed only while its run holds the lane.
    FinishFence,
    /// A reply is not committed once a cancellation was requested.
    FinishObeysCancel,
    /// A finish closes the rows of its run, not of its conversation.
    FinishRowsOfRun,
    /// A finish shows the operations of its run, not whichever are not shown yet.
    FinishOperationsOfRun,
    /// A finish looks for rows that came meanwhile.
    FinishLooksForRows,
    /// It looks in a statement of its own, after the locks.
    FinishLooksAfterLocking,
    /// A commit whose answer was lost is looked up.
    FateIsLookedUp,

    // Settle and recovery.
    /// Leases that are over are looked for at all.
    Recovery,
    /// A settle ends only the run that it is for.
    SettleFence,
    /// A recovery looks at the lease once more, under the lock.
    RecoverOnlyExpired,
    /// A consumer that starts takes back the runs of its own former process only.
    TakeBackOnlyOwn,
    /// A started operation counts as one that may have happened.
    StartedCounts,
    /// A settle of a cancelled lane writes the cancellation.
    SettleObeysCancel,
    /// A settle looks for rows that came meanwhile.
    SettleLooksForRows,

    // User actions.
    /// A user's retry makes rows of a new generation.
    RetryNewGeneration,
    /// One that no other row has which is free or may become so.
    RetryOwnGeneration,
    /// A user's retry asks before a side effect may be doubled.
    RetryAsksAboutEffects,
    /// A user's retry leaves the rows of deleted messages as they are.
    RetryLeavesDeleted,
    /// A turn that is being cancelled stays cancelled when one of its messages is deleted.
    DeletionSparesCancelled,
    /// A turn with a side effect is cancelled whole when one of its messages is deleted.
    DeletionSparesEffects,
    /// Deleting a conversation locks its lane first.
    DepartureLocksLane,
    /// Reading recounts what is unread.
    ReadRecounts,
}

impl Guard {
    pub(crate) const COUNT: usize = Self::ReadRecounts as usize + 1;
}
