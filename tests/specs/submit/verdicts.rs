//! One producer at a time: created, duplicate, or refused with the name of the field.

use anyhow::{Context, Result, ensure};
use shared::{
    ids::{AgentName, ConversationId, MessageId},
    submit::{Message, SubmitError, Submitted, create_conversation},
};
use sqlx::Connection;
use tests::World;

use super::{session, submit, written};

fn message(id: &str, conversation: &str, content: &str) -> Result<Message> {
    Ok(Message {
        conversation_id: ConversationId::new(conversation)?,
        message_id: MessageId::new(id)?,
        content: content.into(),
        trace_context: None,
    })
}

/// `c1` with `m1`, the reply `r1` and the tombstone `gone`; `c2` empty; content of at most 8 bytes.
async fn world() -> Result<World> {
    let world = World::new().await?;
    world.policy("max_content_bytes = 8").await?;
    for conversation in ["c1", "c2"] {
        world.create_conversation(conversation).await?;
    }
    let mut app = session(&world).await?;
    ensure!(submit(&mut app, "m1", "c1", "hello").await == "created");
    ensure!(submit(&mut app, "gone", "c1", "secret").await == "created");
    sqlx::raw_sql(
        "delete from agent_outbox where message_id = 'gone';
         update messages set content = '', deleted_at = now() where id = 'gone';
         insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq)
         values ('r1', 'c1', 3, 'assistant', 'hi', gen_random_uuid(), gen_random_uuid(), 0);
         update conversations set last_seq = 3 where id = 'c1'",
    )
    .execute(&mut app)
    .await?;
    Ok(world)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_written_once_with_its_row_and_its_lane() -> Result<()> {
    let world = World::new().await?;
    world.create_conversation("c1").await?;
    let mut app = session(&world).await?;
    ensure!(submit(&mut app, "m1", "c1", "hello").await == "created");
    let row: (String, i64, String, String, i32, i32) = sqlx::query_as(
        "select m.content, m.seq, m.role, o.status, o.attempts, o.generation
         from messages m join agent_outbox o on o.message_id = m.id and o.conversation_id = m.conversation_id",
    )
    .fetch_one(&world.pool)
    .await?;
    ensure!(row == ("hello".into(), 1, "user".into(), "pending".into(), 0, 1), "{row:?}");
    ensure!(world.lane("c1").await?.state == "waiting");
    let before = written(&world.pool).await?;
    ensure!(submit(&mut app, "m1", "c1", "hello").await == "duplicate");
    let again = shared::submit::submit(&mut app, &message("m1", "c1", "hello")?).await?;
    ensure!(again == Submitted::Duplicate);
    ensure!(written(&world.pool).await? == before, "a duplicate writes nothing");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_submit_names_its_reason_and_its_field_and_writes_nothing() -> Result<()> {
    let world = world().await?;
    let long = "x".repeat(201);
    let wide = "é".repeat(101);
    let before = written(&world.pool).await?;
    let mut app = session(&world).await?;
    for (id, conversation, content, expected) in [
        ("m1", "c1", "other", "message_id_conflict (message_id)"),
        ("m1", "c2", "hello", "message_id_conflict (message_id)"),
        ("r1", "c1", "hi", "message_id_conflict (message_id)"),
        ("gone", "c2", "secret", "message_id_conflict (message_id)"),
        ("gone", "c1", "secret", "message_deleted (message_id)"),
        ("gone", "c1", "", "message_deleted (message_id)"),
        ("m2", "no", "hello", "conversation_not_found (conversation_id)"),
        ("m2", "c1", "123456789", "content_too_large (content)"),
        ("m2", "c1", "éééé5", "content_too_large (content)"),
        ("m1", "c1", "123456789", "content_too_large (content)"),
        ("", "c1", "hello", "message_id_invalid (message_id)"),
        (&long, "c1", "hello", "message_id_invalid (message_id)"),
        (&wide, "c1", "hello", "message_id_invalid (message_id)"),
        ("m2", "", "hello", "conversation_id_invalid (conversation_id)"),
        ("m2", &long, "hello", "conversation_id_invalid (conversation_id)"),
        ("m\0", "c1", "hello", "22021"),
        ("m2", "c1", "hel\0lo", "22021"),
    ] {
        let answer = submit(&mut app, id, conversation, content).await;
        ensure!(answer == expected, "{id:?} {conversation:?} {content:?}: {answer}, and not {expected}");
        ensure!(written(&world.pool).await? == before, "{expected}: something was written");
    }
    for (call, expected) in [
        ("select submit_message(null, 'c1', 'x')", "message_id_invalid (message_id)"),
        ("select submit_message('m2', null, 'x')", "conversation_id_invalid (conversation_id)"),
        ("select submit_message('m2', 'c1', null)", "content_missing (content)"),
        (
            "select submit_message('m2', 'c1', 'x', repeat('x', 513))",
            "trace_context_too_long (trace_context)",
        ),
        ("select create_conversation('c3', 'nobody')", "agent_not_found (agent)"),
        ("select create_conversation('c3', null)", "agent_not_found (agent)"),
        ("select create_conversation('')", "conversation_id_invalid (conversation_id)"),
        ("select create_conversation(repeat('x', 201))", "conversation_id_invalid (conversation_id)"),
    ] {
        let error = sqlx::query(call).execute(&mut app).await.err().context(call)?;
        ensure!(super::refusal(&error) == expected, "{call}: {}", super::refusal(&error));
        ensure!(written(&world.pool).await? == before, "{call}: something was written");
    }
    ensure!(submit(&mut app, "m2", "c1", "12345678").await == "created", "the cap itself is allowed");
    ensure!(submit(&mut app, "m3", "c1", "éééé").await == "created", "the cap counts bytes");
    ensure!(submit(&mut app, "m4", "c1", "").await == "created", "nothing said is something said");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_face_refuses_the_same_by_type() -> Result<()> {
    use SubmitError as E;
    let world = world().await?;
    let before = written(&world.pool).await?;
    let mut app = session(&world).await?;
    let mut refused = async |message: Message| shared::submit::submit(&mut app, &message).await.err();
    ensure!(matches!(refused(message("m1", "c1", "other")?).await, Some(E::MessageIdConflict)));
    ensure!(matches!(refused(message("gone", "c1", "secret")?).await, Some(E::MessageDeleted)));
    ensure!(matches!(refused(message("m2", "no", "hello")?).await, Some(E::ConversationNotFound)));
    ensure!(matches!(refused(message("m2", "c1", "123456789")?).await, Some(E::ContentTooLarge)));
    ensure!(matches!(refused(message("m2", "c1", "a\0b")?).await, Some(E::ContentNul)));
    for trace_context in ["x".repeat(513), "a\0b".into()] {
        let message = Message { trace_context: Some(trace_context), ..message("m2", "c1", "hello")? };
        let error = refused(message).await.context("a trace context that cannot be kept")?.to_string();
        ensure!(error.starts_with("trace_context"), "{error}");
    }
    for (id, field) in [("", "message_id"), (&*"x".repeat(201), "message_id"), ("a\0b", "message_id")] {
        let error = message(id, "c1", "hello").err().context("an id that breaks its rule")?.to_string();
        ensure!(error.starts_with(field) && !error.contains('x'), "{error}");
    }
    for (id, field) in [("", "conversation_id"), ("a\0b", "conversation_id")] {
        let error = message("m2", id, "hello").err().context("an id that breaks its rule")?.to_string();
        ensure!(error.starts_with(field), "{error}");
    }
    let nobody = create_conversation(&mut app, &ConversationId::new("c3")?, &AgentName::new("nobody")?).await;
    ensure!(matches!(nobody, Err(E::AgentNotFound)));
    let known = create_conversation(&mut app, &ConversationId::new("c1")?, &AgentName::default()).await?;
    ensure!(known == Submitted::Duplicate);
    ensure!(written(&world.pool).await? == before, "something was written");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submit_is_of_the_applications_own_transaction() -> Result<()> {
    let world = World::new().await?;
    world.create_conversation("c1").await?;
    sqlx::raw_sql("create table orders (id text primary key)").execute(&world.pool).await?;
    let before = written(&world.pool).await?;
    let mut app = session(&world).await?;

    let mut transaction = app.begin().await?;
    sqlx::query("insert into orders values ('o1')").execute(&mut *transaction).await?;
    ensure!(submit(&mut transaction, "m1", "c1", "hello").await == "created");
    ensure!(submit(&mut transaction, "m1", "c1", "hello").await == "duplicate");
    transaction.rollback().await?;
    ensure!(written(&world.pool).await? == before, "a rolled back submit left something");
    ensure!(world.lane("c1").await?.state == "idle");

    // A refusal takes back to the savepoint no more than itself.
    let mut transaction = app.begin().await?;
    ensure!(submit(&mut transaction, "m1", "c1", "hello").await == "created");
    let mut savepoint = transaction.begin().await?;
    ensure!(submit(&mut savepoint, "m1", "c1", "other").await.starts_with("message_id_conflict"));
    savepoint.rollback().await?;
    sqlx::query("insert into orders values ('o1')").execute(&mut *transaction).await?;
    transaction.commit().await?;
    ensure!(world.count("select count(*) from orders join messages on true").await? == 1);
    ensure!(world.lane("c1").await?.state == "waiting");
    Ok(())
}
