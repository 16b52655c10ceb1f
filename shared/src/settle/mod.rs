//! Settle: the one way in which a run ends without a reply. Handler errors, timeouts, lost leases, rejected content and
//! shutdowns all come through here; [`decide`] says what becomes of the turn, and one guarded transaction writes it.

mod text;
mod verdict;
mod write;

use std::{fmt, time::Duration};

use sqlx::{PgConnection, PgPool, Postgres, Transaction};

pub use self::verdict::{Call, Cause, Kind, Standing, Verdict, decide, run_outcome};
use crate::{
    ids::{ConversationId, RunId, TurnId},
    state::{Effect, OperationStatus},
    wake,
};

/// What a settle did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The turn will be tried again, after this long.
    Retried {
        /// From the settle's commit, in the database's clock.
        after: Duration,
    },
    /// The user sees an error.
    Failed {
        /// Why.
        kind: Kind,
    },
    /// Nothing was left to answer.
    Void,
    /// The lane is not this run's any more, or not in the state that the cause requires: nothing was written.
    Fenced,
    /// The conversation was deleted: nothing was written.
    Gone,
    /// Somebody holds the conversation; look again later. Only [`recover`] returns this.
    Busy,
}

/// In plain words, for the log.
impl fmt::Display for Settled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Retried { after } => write!(f, "to be tried again in {} ms", after.as_millis()),
            Self::Failed { kind } => write!(f, "failed, {}", kind.as_str()),
            Self::Void => f.write_str("nothing left to answer"),
            Self::Fenced => f.write_str("discarded: it has lost its lane"),
            Self::Gone => f.write_str("discarded: its conversation is deleted"),
            Self::Busy => f.write_str("somebody holds the conversation"),
        }
    }
}

impl Settled {
    /// The lane is free now, and may wait to be claimed.
    const fn ends_the_run(self) -> bool {
        matches!(self, Self::Retried { .. } | Self::Failed { .. } | Self::Void)
    }
}

/// A run's lane as it was locked.
struct LockedLane {
    conversation_id: ConversationId,
    run_id: RunId,
    turn_id: TurnId,
    attempt: i32,
    cancel_requested: bool,
}

/// Ends a run for `cause`, if the lane is still its own. Waits for the conversation's lock.
pub async fn settle(
    pool: &PgPool,
    conversation: &ConversationId,
    run: RunId,
    cause: &Cause,
) -> Result<Settled, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let held = sqlx::query_scalar!(
        "select 1 from conversations where id = $1 for no key update",
        conversation.as_str(),
    )
    .fetch_optional(&mut *transaction)
    .await?;
    if held.is_none() {
        transaction.rollback().await?;
        return Ok(Settled::Gone);
    }
    let lane = lock_lane(&mut transaction, conversation, run, cause).await?;
    commit(pool, transaction, lane, cause).await
}

/// Why a run counts as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost<'a> {
    /// Its lease has expired.
    Expired,
    /// It is a former run of this worker, who has just started and so does not run it.
    LeftBy(&'a str),
}

/// In plain words, for the log.
impl fmt::Display for Lost<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("its lease has expired"),
            Self::LeftBy(worker) => write!(f, "left by an earlier process of {worker}"),
        }
    }
}

/// Ends a lost run. Never waits: whoever holds the conversation may be about to end the run itself.
pub async fn recover(
    pool: &PgPool,
    conversation: &ConversationId,
    run: RunId,
    lost: Lost<'_>,
) -> Result<Settled, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let held = sqlx::query_scalar!(
        "select 1 from conversations where id = $1 for no key update skip locked",
        conversation.as_str(),
    )
    .fetch_optional(&mut *transaction)
    .await?;
    if held.is_none() {
        transaction.rollback().await?;
        return Ok(Settled::Busy);
    }
    let lane = lock_lost_lane(&mut transaction, conversation, run, lost).await?;
    commit(pool, transaction, lane, &Cause::Expired).await
}

/// Settles the lane, if the run still holds it, commits, and wakes who may claim the lane now.
async fn commit(
    pool: &PgPool,
    mut transaction: Transaction<'_, Postgres>,
    lane: Option<LockedLane>,
    cause: &Cause,
) -> Result<Settled, sqlx::Error> {
    let settled = match lane {
        Some(lane) => settle_locked(&mut transaction, &lane, cause).await?,
        None => Settled::Fenced,
    };
    transaction.commit().await?;
    if settled.ends_the_run() {
        wake::notify(pool).await;
    }
    Ok(settled)
}

/// The rest of a settle, with conversation and lane locked: what is decided under both, in statements with new snapshots.
async fn settle_locked(
    connection: &mut PgConnection,
    lane: &LockedLane,
    cause: &Cause,
) -> Result<Settled, sqlx::Error> {
    let (standing, last_seq) = read_standing(connection, lane).await?;
    let verdict = decide(cause, &standing);
    let ended = write::Ended { lane, outcome: run_outcome(cause, &verdict), cause };
    match verdict {
        Verdict::Retry { now, at_least } => {
            let after = write::retry(connection, &ended, now, at_least).await?;
            Ok(Settled::Retried { after })
        }
        Verdict::Fail { kind, exhausted, retryable } => {
            let failure = write::Failure {
                kind,
                exhausted,
                retryable,
                text: text::for_the_user(kind, &standing),
                reply_to_seq: last_seq,
            };
            write::fail(connection, &ended, &failure).await?;
            Ok(Settled::Failed { kind })
        }
        Verdict::Void => {
            write::void(connection, &ended).await?;
            Ok(Settled::Void)
        }
    }
}

async fn lock_lane(
    connection: &mut PgConnection,
    conversation: &ConversationId,
    run: RunId,
    cause: &Cause,
) -> Result<Option<LockedLane>, sqlx::Error> {
    let state = if matches!(cause, Cause::Undeliverable { .. }) { "queued" } else { "running" };
    sqlx::query_as!(
        LockedLane,
        r#"
        select l.conversation_id as "conversation_id: ConversationId",
               l.run_id as "run_id!: RunId",
               l.turn_id as "turn_id!: TurnId",
               l.attempt,
               l.cancel_requested
        from agent_lanes l
        where l.conversation_id = $1
          and l.run_id = $2
          and l.state = $3
        for update
        "#,
        conversation.as_str(),
        run as RunId,
        state,
    )
    .fetch_optional(connection)
    .await
}

async fn lock_lost_lane(
    connection: &mut PgConnection,
    conversation: &ConversationId,
    run: RunId,
    lost: Lost<'_>,
) -> Result<Option<LockedLane>, sqlx::Error> {
    let worker = match lost {
        Lost::Expired => None,
        Lost::LeftBy(worker) => Some(worker),
    };
    sqlx::query_as!(
        LockedLane,
        r#"
        select l.conversation_id as "conversation_id: ConversationId",
               l.run_id as "run_id!: RunId",
               l.turn_id as "turn_id!: TurnId",
               l.attempt,
               l.cancel_requested
        from agent_lanes l
        where l.conversation_id = $1
          and l.run_id = $2
          and l.state = 'running'
          -- a lease that was renewed meanwhile is not lost
          and case when $3::text is null then l.wake_at <= (select clock_timestamp()) else l.worker = $3 end
        for update
        "#,
        conversation.as_str(),
        run as RunId,
        worker,
    )
    .fetch_optional(connection)
    .await
}

async fn read_standing(
    connection: &mut PgConnection,
    lane: &LockedLane,
) -> Result<(Standing, i64), sqlx::Error> {
    let turn = sqlx::query!(
        r#"
        select a.max_attempts,
               (select count(*) from agent_outbox o
                where o.conversation_id = l.conversation_id and o.turn_id = l.turn_id
                  and o.run_id = l.run_id and o.status = 'processing') as "rows!",
               (select coalesce(max(m.seq), 0) from agent_outbox o join messages m on m.id = o.message_id
                where o.conversation_id = l.conversation_id and o.turn_id = l.turn_id) as "last_seq!"
        from agent_lanes l join agents a on a.name = l.agent
        where l.conversation_id = $1
        "#,
        lane.conversation_id.as_str(),
    )
    .fetch_one(&mut *connection)
    .await?;
    let calls = sqlx::query_as!(
        Call,
        r#"
        select name, effect as "effect: Effect", status as "status: OperationStatus"
        from operations
        where conversation_id = $1 and turn_id = $2
        order by started_at, ordinal
        "#,
        lane.conversation_id.as_str(),
        lane.turn_id as TurnId,
    )
    .fetch_all(connection)
    .await?;
    let standing = Standing {
        attempt: lane.attempt,
        max_attempts: turn.max_attempts,
        cancel_requested: lane.cancel_requested,
        rows: turn.rows,
        calls,
    };
    Ok((standing, turn.last_seq))
}
