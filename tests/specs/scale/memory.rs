//! A relay keeps what is in flight, and nothing of what waits.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tests::{Process, World};

use super::measured;

/// Rows that wait; the variable sets more for a longer look.
const VARIABLE: &str = "PENDING_ROWS";
const PENDING: i32 = 120_000;
/// Rows a conversation.
const EACH: i32 = 4;
/// What a debug build may grow by, after it has warmed up, whatever waits: far less than the rows that pass through.
const GROWTH_KIB: u64 = 12 * 1024;

/// What submits would have left. The lanes' trigger fires; they wait from the start.
const BACKLOG: &str = "
    insert into conversations (id, last_seq) select 'c' || n, $E from generate_series(1, $N / $E) n;
    insert into messages (id, conversation_id, seq, role, content)
    select 'm' || n, 'c' || 1 + n / $E, 1 + n % $E, 'user', repeat('x', 100) from generate_series(0, $N - 1) n;
    insert into agent_outbox (conversation_id, message_id)
    select 'c' || 1 + n / $E, 'm' || n from generate_series(0, $N - 1) n;
    update agent_lanes set state = 'waiting', waiting_since = now(), wake_at = now()";

fn resident_kib(relay: &Process) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", relay.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relays_memory_is_flat_whatever_waits() -> Result<()> {
    let pending = std::env::var(VARIABLE).map_or(Ok(PENDING), |rows| rows.parse())?;
    let world = World::new().await?;
    let sql = BACKLOG.replace("$N", &pending.to_string()).replace("$E", &EACH.to_string());
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&world.pool).await?;
    sqlx::raw_sql("analyze").execute(&world.pool).await?;
    // Nobody consumes, and nothing falls overdue: the relay claims and publishes all there is.
    world.policy("dispatch_timeout = '1 hour'").await?;
    let relay = world.relay().start()?;
    let queued = async |lanes: i32| {
        let waiting = i64::from(pending / EACH - lanes);
        world
            .eventually_within(Duration::from_mins(5), "lanes are queued", async || {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Ok(world.count("select count(*) from agent_lanes where state = 'waiting'").await? <= waiting)
            })
            .await
    };
    queued(5_000).await?;
    let warm = resident_kib(&relay)?;
    let mut most = warm;
    for tenth in 2..=10 {
        queued(pending / EACH / 10 * tenth).await?;
        most = most.max(resident_kib(&relay)?);
    }
    let (warm_mib, most_mib) = (warm / 1024, most / 1024);
    measured(&format!(
        "relay, {pending} rows: {warm_mib} MiB after 5,000 lanes, at most {most_mib} MiB until all"
    ))?;
    ensure!(most <= warm + GROWTH_KIB, "{warm} KiB grew to {most} KiB");
    relay.shut_down().await?;
    let held = world.jetstream().get_stream(&world.stream).await?.cached_info().state.messages;
    // More where the broker was slow to acknowledge, and the claims were given back.
    ensure!(held >= u64::try_from(pending / EACH)?, "the stream holds {held}");
    Ok(())
}
