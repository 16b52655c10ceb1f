//! Recovery: every run whose lease has expired is settled, by whoever looks. Needs Postgres alone, so a relay does it while
//! its broker is down, and a consumer without a broker does it for itself. A consumer that starts also settles what its
//! former process left, so that a restart does not cost a lease.

use futures_util::{StreamExt, stream};
use sqlx::PgPool;

use crate::{
    failpoint,
    ids::{ConversationId, RunId},
    settle::{self, Lost, Settled},
    sqlstate,
};

/// Lanes looked at in one go, so that other work is never far away.
const PAGE: i64 = 256;
/// Settles under way at once.
const AT_ONCE: usize = 4;

struct LostRun {
    conversation_id: ConversationId,
    run_id: RunId,
}

/// Settles the runs whose lease has expired, the longest ago first, a page at most. Returns how many it settled: one that
/// somebody holds, or that Postgres refuses now, is work for a later look, and no reason to look again at once.
pub async fn recover_expired(pool: &PgPool) -> Result<usize, sqlx::Error> {
    let expired = expired(pool).await?;
    Ok(recover_all(pool, expired, Lost::Expired).await)
}

/// Settles the runs that a former process of this name left behind, without waiting for their leases. Only for a worker
/// that has just started, under a name of its own: were the former process still alive, its runs would be refused from
/// now on. Returns how many it settled; what somebody holds is left to the leases.
pub async fn take_back(pool: &PgPool, worker: &str) -> Result<usize, sqlx::Error> {
    let left = left_by(pool, worker).await?;
    Ok(recover_all(pool, left, Lost::LeftBy(worker)).await)
}

async fn recover_all(pool: &PgPool, runs: Vec<LostRun>, lost: Lost<'_>) -> usize {
    let settled = stream::iter(runs)
        .map(|run| recover_one(pool, run, lost))
        .buffer_unordered(AT_ONCE)
        .filter(|settled| std::future::ready(*settled));
    settled.count().await
}

async fn recover_one(pool: &PgPool, lane: LostRun, lost: Lost<'_>) -> bool {
    if failpoint::reach("mid_reconcile").await.is_err() {
        return false;
    }
    match settle::recover(pool, &lane.conversation_id, lane.run_id, lost).await {
        Ok(Settled::Busy) => {
            tracing::debug!(run_id = %lane.run_id, "a run is lost; somebody holds its conversation");
            false
        }
        Ok(settled) => {
            tracing::info!(run_id = %lane.run_id, %lost, outcome = %settled, "a lost run was settled");
            true
        }
        Err(error) => {
            tracing::warn!(run_id = %lane.run_id, error = sqlstate::safe_text(&error), "recovery failed");
            false
        }
    }
}

async fn expired(pool: &PgPool) -> Result<Vec<LostRun>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let expired = sqlx::query_as!(
        LostRun,
        r#"
        select conversation_id as "conversation_id: ConversationId", run_id as "run_id!: RunId"
        from agent_lanes
        where state = 'running' and wake_at <= (select clock_timestamp())
        order by wake_at
        limit $1
        "#,
        PAGE,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(expired)
}

async fn left_by(pool: &PgPool, worker: &str) -> Result<Vec<LostRun>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let left = sqlx::query_as!(
        LostRun,
        r#"
        select conversation_id as "conversation_id: ConversationId", run_id as "run_id!: RunId"
        from agent_lanes
        where state = 'running' and wake_at is not null and worker = $1
        order by wake_at
        "#,
        worker,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(left)
}
