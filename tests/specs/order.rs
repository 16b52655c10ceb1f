//! Order within a conversation, however many claim, deliver and run.

use anyhow::{Result, ensure};
use shared::settings::Source;
use tests::World;

use crate::load::{Load, Witness, no_attempt_was_lost};

const MANY: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn many_relays_and_consumers_keep_the_order_of_every_conversation() -> Result<()> {
    const LOAD: Load = Load { conversations: 10, messages: 30 };
    let world = World::new().await?;
    // Turns of a few messages, so that each conversation has many of them.
    world.policy("debounce = '0', max_turn_messages = 2").await?;
    LOAD.prepare(&world).await?;
    let witness = Witness::default();
    let (mut relays, mut consumers) = (Vec::new(), Vec::new());
    for _ in 0..MANY {
        relays.push(world.local_relay().await?);
        let settings = world.consumer_settings(Source::Nats);
        consumers.push(world.local_consumer(settings, witness.handler()).await?);
    }
    LOAD.submit(&world, 0..LOAD.messages).await?;
    LOAD.answered(&world).await?;
    witness.saw_all_in_order(LOAD)?;
    no_attempt_was_lost(&world).await?;
    let turns = world.count("select count(*) from messages where role = 'assistant'").await?;
    ensure!(i64::try_from(witness.calls())? == turns, "{} calls for {turns} turns", witness.calls());
    let workers = world.count("select count(distinct worker) from agent_runs").await?;
    ensure!(workers > 1, "one consumer did all the work: nothing was shown");
    for process in relays.into_iter().chain(consumers) {
        process.stop().await?;
    }
    Ok(())
}
