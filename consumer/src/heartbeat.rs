//! The heartbeat: one statement renews every lease of the process. It has a thread, a runtime and a connection of its own,
//! so that neither a handler that blocks every thread nor an exhausted pool can cost a lease.

use std::{thread, time::Duration};

use shared::{
    ids::{AgentName, RunId},
    policy::Policies,
    sqlstate,
};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;

use crate::leases::{Beat, Leases};

/// Renewals within one lease: a few may fail before a lease is lost.
const BEATS_A_LEASE: u32 = 5;

/// Renews leases until told to stop.
pub(crate) struct Heartbeat {
    pub(crate) options: PgConnectOptions,
    pub(crate) leases: Leases,
    /// Where the agent's lease stands.
    pub(crate) policies: watch::Receiver<Policies>,
    pub(crate) agent: AgentName,
    pub(crate) stop: CancellationToken,
}

impl Heartbeat {
    /// Starts the thread. The receiver tells when it has ended, whatever ended it.
    pub(crate) fn spawn(self) -> std::io::Result<tokio::sync::oneshot::Receiver<()>> {
        let (ended, end) = tokio::sync::oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("heartbeat".into()).spawn(move || {
            runtime.block_on(self.run());
            drop(ended);
        })?;
        Ok(end)
    }

    async fn run(mut self) {
        let mut connection = None;
        loop {
            let lease = lease_of(&self.policies.borrow_and_update(), &self.agent);
            let mut ticks = tokio::time::interval(lease / BEATS_A_LEASE);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    () = self.stop.cancelled() => return,
                    changed = self.policies.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                    _ = ticks.tick() => self.tick(&mut connection, lease).await,
                }
            }
        }
    }

    async fn tick(&self, connection: &mut Option<PgConnection>, lease: Duration) {
        let (conversations, runs) = self.leases.held();
        if !runs.is_empty() {
            let since = Instant::now();
            // Not longer than a beat may take: a connection that stands still is left for a new one.
            let renewal = self.renew(connection, &conversations, &runs);
            match tokio::time::timeout(lease / BEATS_A_LEASE * 2, renewal).await {
                Ok(Ok(beats)) => {
                    let lost = self.leases.beat(&runs, since, &beats);
                    if lost > 0 {
                        tracing::warn!(lost, held = runs.len(), "leases were lost");
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(
                        error = sqlstate::safe_text(&error),
                        held = runs.len(),
                        "leases were not renewed"
                    );
                    *connection = None;
                }
                Err(_) => {
                    tracing::warn!(held = runs.len(), "leases were not renewed in time");
                    *connection = None;
                }
            }
        }
        let expired = self.leases.expire(lease);
        if expired > 0 {
            tracing::warn!(expired, "leases could not be kept");
        }
    }

    async fn renew(
        &self,
        connection: &mut Option<PgConnection>,
        conversations: &[String],
        runs: &[RunId],
    ) -> Result<Vec<Beat>, sqlx::Error> {
        let connection = match connection {
            Some(connection) => connection,
            None => connection.insert(self.options.connect().await?),
        };
        let mut transaction = connection.begin().await?;
        let beats = renew_held(&mut transaction, conversations, runs).await?;
        transaction.commit().await?;
        Ok(beats)
    }
}

/// An agent that was deleted under its consumers keeps the shortest lease there is.
pub(crate) fn lease_of(policies: &Policies, agent: &AgentName) -> Duration {
    policies.get(agent).map_or(Duration::from_secs(1), |policy| policy.lease)
}

/// Renews what is still held. A lane that somebody else holds for a moment is skipped, and read instead: skipped is not
/// lost.
async fn renew_held(
    connection: &mut PgConnection,
    conversations: &[String],
    runs: &[RunId],
) -> Result<Vec<Beat>, sqlx::Error> {
    sqlx::query_as!(
        Beat,
        r#"
        with mine as (
            select * from unnest($1::text[], $2::uuid[]) as t (conversation_id, run_id)
            order by conversation_id
        ), free as (
            select l.*
            from mine cross join lateral (
                select l.conversation_id from agent_lanes l
                where l.conversation_id = mine.conversation_id and l.run_id = mine.run_id
                  and l.state = 'running'
                for update skip locked
            ) l
        ), renewed as (
            update agent_lanes l set wake_at = clock_timestamp() + a.lease
            from free, agents a
            where l.conversation_id = free.conversation_id and a.name = l.agent
            returning l.run_id
        )
        select l.run_id as "run_id!: RunId",
               l.run_id in (select run_id from renewed) as "renewed!",
               l.cancel_requested
        from mine join agent_lanes l on l.conversation_id = mine.conversation_id and l.run_id = mine.run_id
        where l.state = 'running'
        "#,
        conversations,
        runs as &[RunId],
    )
    .fetch_all(connection)
    .await
}
