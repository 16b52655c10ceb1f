//! The harness itself: what every other spec takes for granted.

mod up;

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::stream;
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection};
use tests::{Server, Servers, Spec, World, invariants, programs};
use tokio::time::{sleep, timeout};

/// The major version of the world's PostgreSQL.
async fn postgres_version(world: &World) -> Result<i64> {
    world.count("select current_setting('server_version_num')::bigint / 10000").await
}

async fn gone(pids: &[u32]) -> Result<()> {
    let runs = |pid: &u32| {
        let status = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
        // A zombie has ended; some containers have nobody who collects it.
        status.is_ok_and(|text| !text.rsplit(") ").next().unwrap_or_default().starts_with('Z'))
    };
    let all_gone = async {
        while pids.iter().any(runs) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(30), all_gone).await.with_context(|| format!("some of {pids:?} still run"))
}

#[tokio::test(flavor = "multi_thread")]
async fn worlds_share_servers_and_nothing_else() -> Result<()> {
    let (one, other) = tokio::try_join!(World::new(), World::new())?;
    ensure!(one.servers.addresses().pids == other.servers.addresses().pids);
    one.create_conversation("c1").await?;
    one.submit("c1", "hello").await?;
    ensure!(one.lane("c1").await?.state == "waiting");
    ensure!(other.count("select count(*) from conversations").await? == 0);
    ensure!(one.stream != other.stream && one.prefix != other.prefix);
    one.jetstream().query_account().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn invariants_hold_in_an_untouched_world_and_name_what_breaks_them() -> Result<()> {
    let world = World::new().await?;
    invariants::assert_invariants(&world.pool).await?;
    world.create_conversation("c1").await?;
    let message = world.submit("c1", "hello").await?;
    invariants::assert_consistent(&world.pool).await?;
    let unsettled =
        invariants::assert_invariants(&world.pool).await.err().context("a row is open")?.to_string();
    ensure!(unsettled.contains("no row is open") && unsettled.contains(&message), "{unsettled}");
    sqlx::query("update conversations set unread_count = 1").execute(&world.pool).await?;
    let miscounted =
        invariants::assert_consistent(&world.pool).await.err().context("it is miscounted")?.to_string();
    ensure!(miscounted.contains("unread_count is the number") && miscounted.contains("c1"), "{miscounted}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_condition_that_stays_false_is_reported_with_the_state_of_the_pipeline() -> Result<()> {
    let world = World::new().await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "a secret").await?;
    let waited = world.eventually_within(Duration::from_millis(50), "pigs fly", async || Ok(false)).await;
    let report = waited.err().context("pigs flew")?.to_string();
    ensure!(report.contains("until pigs fly") && report.contains("c1 waiting"), "{report}");
    ensure!(!report.contains("a secret"), "content in a report: {report}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn there_is_room_for_the_streams_of_many_worlds() -> Result<()> {
    let world = World::new().await?;
    for number in 0..200 {
        let name = format!("ROOM_{number}");
        let stream = stream::Config {
            name: name.clone(),
            subjects: vec![name],
            max_bytes: 1 << 30,
            ..Default::default()
        };
        world.jetstream().create_stream(stream).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn private_servers_can_be_killed_restarted_and_wiped() -> Result<()> {
    let world = World::on(Servers::private(Spec { pgbouncer: true, ..Spec::default() }).await?).await?;
    let servers = &world.servers;
    world.create_conversation("c1").await?;
    let stream = stream::Config { name: "KEPT".into(), ..Default::default() };
    world.jetstream().create_stream(stream).await?;

    servers.kill(Server::Postgres).await?;
    ensure!(PgConnection::connect(&world.database_url()).await.is_err());
    servers.resume(Server::Postgres).await?;
    servers.restart(Server::Postgres).await?;
    world
        .eventually("the conversation is back", async || Ok(world.lane("c1").await?.state == "idle"))
        .await?;

    servers.restart(Server::Nats).await?;
    let kept = async || Ok(world.jetstream().get_stream("KEPT").await.is_ok());
    world.eventually("the stream survived a restart", kept).await?;
    servers.wipe_nats().await?;
    let lost = async || {
        let answer = world.jetstream().get_stream("KEPT").await;
        Ok(answer.is_err_and(|error| error.to_string().contains("not found")))
    };
    world.eventually("the stream is gone", lost).await?;

    let mut pooled = PgConnection::connect(&world.pooled_url()?).await?;
    sqlx::raw_sql("begin; select 1; commit").execute(&mut pooled).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_supported_servers_start() -> Result<()> {
    let (postgres_bin, nats_bin) = (programs::postgres_18_bin()?, programs::nats_server_oldest()?);
    let (newer, older) = (postgres_bin.is_some(), nats_bin.is_some());
    let world =
        World::on(Servers::private(Spec { postgres_bin, nats_bin, ..Spec::default() }).await?).await?;
    ensure!(!newer || postgres_version(&world).await? == 18);
    // The client connects by itself, some time after it was made: an answer shows that it has.
    world.jetstream().query_account().await?;
    let version = world.nats.server_info().version;
    ensure!(!older || version.starts_with("2.10."), "nats-server {version}");
    invariants::assert_invariants(&world.pool).await
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_end_with_their_guard() -> Result<()> {
    // A killed guard cannot remove its directory.
    let home = tempfile::tempdir()?;
    let servers = Servers::private(Spec { home: Some(home.path().to_owned()), ..Spec::default() }).await?;
    let guard = Pid::from_raw(servers.guard_pid().try_into()?).context("no pid")?;
    kill_process(guard, Signal::KILL)?;
    gone(&servers.addresses().pids).await
}

/// What `nothing_survives_a_killed_test_process` kills.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by another test, as a process of its own"]
async fn test_process_that_waits_to_be_killed() -> Result<()> {
    let world = World::new().await?;
    let relay = world.relay().start()?;
    relay.ready().await?;
    let mut pids = world.servers.addresses().pids.clone();
    pids.extend([world.servers.guard_pid(), relay.pid()]);
    writeln!(std::io::stdout(), "\npids {}", serde_json::to_string(&pids)?)?;
    std::future::pending().await
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_survives_a_killed_test_process() -> Result<()> {
    let mut victim = Command::new(std::env::current_exe()?)
        .args(["--exact", "harness::test_process_that_waits_to_be_killed", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(victim.stdout.take().context("no output")?).lines();
    let pids = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("pids ")?.to_owned()));
    let pids: Vec<u32> =
        serde_json::from_str(&pids.context("the victim has failed; its error stands above")?)?;
    ensure!(pids.len() == 4, "PostgreSQL, NATS, guard and relay: {pids:?}");
    victim.kill()?;
    victim.wait()?;
    gone(&pids).await
}
