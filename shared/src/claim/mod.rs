//! The claim: rows become a turn, a turn gets a run, and the attempt is counted before anything else happens.
//!
//! Three statements in one transaction: lock the lanes that are due, read their rows under the locks with a new snapshot,
//! write both. The relay claims into `queued` and publishes; a direct consumer claims into `running` and begins at once.

mod draft;
mod empty;
mod sql;

use std::collections::HashSet;

use sqlx::PgPool;

pub use empty::close_empty_lane;

use self::{draft::Draft, sql::DueLane};
use crate::ids::{AgentName, ConversationId, RunId, TurnId};

/// Whose lanes to claim, and for what.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// At most this many lanes.
    pub batch: u32,
    /// Only these agents' lanes, in this order of preference; `None`: every agent's, by one index.
    pub agents: Option<&'a [AgentName]>,
    /// The consumer that begins the runs at once, of suspects one at most; `None`: the runs are queued, to be published.
    pub worker: Option<&'a str>,
}

/// One turn that this process has claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// Whose lane it is.
    pub conversation_id: ConversationId,
    /// Who answers.
    pub agent: AgentName,
    /// The rows' identity, equal across attempts.
    pub turn_id: TurnId,
    /// This attempt: the fence.
    pub run_id: RunId,
    /// Which attempt it is, from 1.
    pub attempt: i32,
    /// How often the run was handed to the broker, this time included.
    pub dispatches: i32,
    /// The W3C traceparent of the turn's first message that had one.
    pub trace_context: Option<String>,
}

/// What a claim found.
#[derive(Debug, Default)]
pub struct Claims {
    /// Turns claimed.
    pub turns: Vec<Claimed>,
    /// Due lanes without rows: their messages were deleted. [`close_empty_lane`] decides about each.
    pub empty: Vec<ConversationId>,
    /// Outbox rows in the claimed turns.
    pub rows: usize,
    /// Runs whose turn's attempt before this one lost its lease: it may have killed its process.
    pub suspects: HashSet<RunId>,
}

/// Claims up to `claim.batch` due lanes, the longest due first.
pub async fn claim(pool: &PgPool, claim: Claim<'_>) -> Result<Claims, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let lanes = match claim.agents {
        None => sql::lock_due_lanes(&mut transaction, claim.batch).await?,
        Some(agents) => sql::lock_due_lanes_of(&mut transaction, agents, claim.batch).await?,
    };
    let lanes = if claim.worker.is_some() { with_one_suspect(lanes) } else { lanes };
    if lanes.is_empty() {
        transaction.rollback().await?;
        return Ok(Claims::default());
    }
    let rows = sql::read_free_rows(&mut transaction, &lanes).await?;
    let draft = Draft::new(lanes, rows);
    let marked = sql::mark(&mut transaction, &draft, claim.worker).await?;
    transaction.commit().await?;
    Ok(draft.claims(marked))
}

/// Who begins at once begins one suspect at a time: each runs alone, and one that holds its lane while it waits for another
/// would lose an attempt to that one's crash. The rest stay due.
fn with_one_suspect(mut lanes: Vec<DueLane>) -> Vec<DueLane> {
    let mut taken = false;
    lanes.retain(|lane| !lane.suspect || !std::mem::replace(&mut taken, true));
    lanes
}
