//! Policy as the processes use it: the `agents` table, re-read every few seconds.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sqlx::{PgPool, postgres::types::PgInterval};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{admin::Readiness, ids::AgentName, sqlstate};

/// How often a process re-reads policy.
const REFRESH: Duration = Duration::from_secs(2);
/// The name of the readiness check on it.
const CHECK: &str = "policy";

/// What a process needs to know of one agent; the rest is read by the statements that use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// How long a run lives without a renewal.
    pub lease: Duration,
    /// Deadline of one run of the handler.
    pub turn_timeout: Duration,
    /// No claims while true.
    pub paused: bool,
}

/// All agents by name.
pub type Policies = Arc<BTreeMap<AgentName, Policy>>;

/// Reads all policy once.
pub async fn read(pool: &PgPool) -> Result<Policies, sqlx::Error> {
    let mut connection = pool.begin().await?;
    let agents = sqlx::query!(
        r#"select name as "name: AgentName", lease, turn_timeout, paused from agents order by name"#
    )
    .fetch_all(&mut *connection)
    .await?;
    connection.commit().await?;
    let policies = agents.into_iter().map(|agent| {
        let policy = Policy {
            lease: duration(&agent.lease),
            turn_timeout: duration(&agent.turn_timeout),
            paused: agent.paused,
        };
        (agent.name, policy)
    });
    Ok(Arc::new(policies.collect()))
}

/// Keeps a watch of policy fresh until told to stop. While Postgres cannot be read, the last known policy stands, and
/// readiness says so: an idle process too notices that Postgres is away.
pub async fn refresh(
    pool: PgPool,
    policies: watch::Sender<Policies>,
    readiness: Readiness,
    stop: CancellationToken,
) {
    while stop.run_until_cancelled(tokio::time::sleep(REFRESH)).await.is_some() {
        match read(&pool).await {
            Ok(fresh) => {
                readiness.set_ready(CHECK);
                policies.send_if_modified(|known| {
                    let changed = *known != fresh;
                    *known = fresh;
                    changed
                });
            }
            Err(error) => {
                let error = sqlstate::safe_text(&error);
                tracing::warn!(error, "policy could not be re-read");
                readiness.set_not_ready(CHECK, error);
            }
        }
    }
}

/// The CHECKs of `agents` keep every interval positive and under a month's ambiguity; a month counts as 30 days, as
/// Postgres itself compares it.
fn duration(interval: &PgInterval) -> Duration {
    let days = i64::from(interval.days) + 30 * i64::from(interval.months);
    let micros = interval.microseconds.saturating_add(days.saturating_mul(86_400_000_000));
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_the_duration_that_postgres_compares_it_as() {
        let day = PgInterval { months: 0, days: 1, microseconds: 1 };
        assert_eq!(duration(&day), Duration::from_micros(86_400_000_001));
        let month = PgInterval { months: 1, days: 0, microseconds: 0 };
        assert_eq!(duration(&month), Duration::from_hours(30 * 24));
    }
}
