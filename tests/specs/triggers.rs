//! Whatever lies on the stream: nothing is trusted that comes from the broker.

use anyhow::{Result, ensure};
use consumer::{Reply, Turn, handler_fn};
use serde_json::json;
use shared::{
    ids::ConversationId,
    settings::Source,
    trigger::{Subjects, Trigger},
};
use tests::World;
use uuid::Uuid;

/// Bodies that are no trigger, each of another kind.
fn rubbish() -> Vec<Vec<u8>> {
    let ids = json!({"run_id": Uuid::nil(), "turn_id": Uuid::nil(), "conversation_id": "c1", "attempt": 1});
    let with = |field: &str, value: serde_json::Value| {
        let mut body = ids.clone();
        body["v"] = json!(1);
        body[field] = value;
        body.to_string().into_bytes()
    };
    vec![
        Vec::new(),
        b"not json".to_vec(),
        b"\xff\xfe\x00".to_vec(),
        b"[]".to_vec(),
        ids.to_string().into_bytes(),
        with("v", json!(2)),
        with("v", json!("1")),
        with("run_id", json!("'; drop table agent_lanes; --")),
        with("conversation_id", json!("")),
        with("conversation_id", json!("x".repeat(201))),
        with("attempt", json!(9_007_199_254_740_993_i64)),
        vec![b'['; 3000],
        vec![b'x'; 100_000],
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_trigger_or_a_stale_or_foreign_one_is_dropped_and_disturbs_nobody() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    let handler = handler_fn(|_: Turn| async { Ok(Reply::new("yes")) });
    let _relay = world.local_relay().await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    world.create_conversation("c1").await?;
    world.create_conversation("c2").await?;
    world.submit("c1", "hello").await?;
    world.answered("c1", 1).await?;
    let (turn, run): (Uuid, Uuid) =
        sqlx::query_as("select turn_id, run_id from agent_runs").fetch_one(&world.pool).await?;

    let mut bodies = rubbish();
    let trigger = |conversation: &str, run| -> Result<Vec<u8>> {
        let conversation = ConversationId::new(conversation)?;
        Ok(Trigger::new(shared::ids::RunId(run), shared::ids::TurnId(turn), conversation, 1).encode()?)
    };
    bodies.push(trigger("c1", run)?);
    bodies.push(trigger("c2", run)?);
    bodies.push(trigger("c1", Uuid::from_u128(7))?);
    bodies.push(trigger("never-made", run)?);
    let subject = Subjects::new(world.prefix.clone()).of(&"default".parse()?, &ConversationId::new("c1")?);
    let jetstream = world.jetstream();
    for body in bodies {
        jetstream.publish(subject.clone(), body.into()).await?.await?;
    }
    let stream = jetstream.get_stream(&world.stream).await?;
    let empty = async || Ok(stream.get_info().await?.state.messages == 0);
    world.eventually("everything on the stream is acknowledged", empty).await?;

    ensure!(world.count("select count(*) from agent_runs").await? == 1, "nothing was run for it");
    world.submit("c2", "and you?").await?;
    world.answered("c2", 1).await?;
    world.settled().await
}
