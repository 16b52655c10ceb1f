//! Two sources of turns on one database, the ways from one to the other, and the way through a pooler.

use anyhow::{Result, ensure};
use shared::settings::Source;
use tests::{Process, Servers, Spec, World};

use crate::load::{Load, Witness, no_attempt_was_lost};

#[tokio::test(flavor = "multi_thread")]
async fn both_sources_at_once_answer_each_message_once_and_in_order() -> Result<()> {
    const LOAD: Load = Load { conversations: 20, messages: 15 };
    let world = World::new().await?;
    world.policy("debounce = '0', max_turn_messages = 2").await?;
    LOAD.prepare(&world).await?;
    let witness = Witness::default();
    let mut processes = vec![world.local_relay().await?];
    for source in [Source::Nats, Source::Postgres, Source::Nats, Source::Postgres] {
        processes.push(world.local_consumer(world.consumer_settings(source), witness.handler()).await?);
    }
    LOAD.submit(&world, 0..LOAD.messages).await?;
    LOAD.answered(&world).await?;
    witness.saw_all_in_order(LOAD)?;
    no_attempt_was_lost(&world).await?;
    for process in processes {
        process.stop().await?;
    }
    Ok(())
}

fn direct(world: &World) -> Result<Process> {
    world.consumer().env("SOURCE", "postgres").start()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_system_migrates_to_nats_and_back() -> Result<()> {
    const LOAD: Load = Load { conversations: 10, messages: 9 };
    let world = World::new().await?;
    world.policy("debounce = '0', dispatch_timeout = '500 ms'").await?;
    LOAD.prepare(&world).await?;
    let before = direct(&world)?;
    LOAD.submit(&world, 0..2).await?;
    // There: relays first, then consumers of the other source, then the former ones leave.
    let relay = world.relay().start()?;
    LOAD.submit(&world, 2..4).await?;
    let consumer = world.consumer().start()?;
    consumer.ready().await?;
    LOAD.submit(&world, 4..6).await?;
    before.shut_down().await?;
    LOAD.submit(&world, 6..7).await?;
    // And back, in the worst order: nobody is left to begin what the relay has queued.
    consumer.shut_down().await?;
    LOAD.submit(&world, 7..8).await?;
    let queued = "select count(*) from agent_lanes where state = 'queued'";
    let all = i64::try_from(LOAD.conversations)?;
    world.eventually("runs are queued", async || Ok(world.count(queued).await? == all)).await?;
    relay.shut_down().await?;
    let after = direct(&world)?;
    LOAD.submit(&world, 8..9).await?;
    LOAD.answered(&world).await?;
    no_attempt_was_lost(&world).await?;
    // The triggers that nobody took find their runs ended.
    let _latecomer = world.consumer().start()?;
    let taken = async || {
        let mut stream = world.jetstream().get_stream(&world.stream).await?;
        Ok(stream.info().await?.state.messages == 0)
    };
    world.eventually("the stream is empty", taken).await?;
    after.shut_down().await?;
    world.settled().await?;
    no_attempt_was_lost(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_works_by_polling_behind_a_pooler_in_transaction_mode() -> Result<()> {
    const LOAD: Load = Load { conversations: 20, messages: 6 };
    let servers = Servers::private(Spec { pgbouncer: true, ..Spec::default() }).await?;
    for source in ["nats", "postgres"] {
        let world = World::on(servers.clone()).await?;
        world.policy("debounce = '0', max_turn_messages = 2, lease = '2 s'").await?;
        LOAD.prepare(&world).await?;
        let mut processes = Vec::new();
        for _ in 0..2 {
            if source == "nats" {
                processes.push(world.relay().pooled()?.start()?);
            }
            // Long enough for a heartbeat, so that leases are renewed through the pooler too.
            let consumer = world.consumer().env("SOURCE", source).env("ECHO_DELAY", "500ms");
            processes.push(consumer.pooled()?.start()?);
        }
        for process in &processes {
            process.ready().await?;
        }
        LOAD.submit(&world, 0..LOAD.messages).await?;
        LOAD.answered(&world).await?;
        no_attempt_was_lost(&world).await?;
        for process in processes {
            let log = process.log()?;
            ensure!(!log.contains(r#""ERROR""#) && !log.contains("SQLSTATE"), "{}:\n{log}", process.name());
            process.shut_down().await?;
        }
    }
    Ok(())
}
