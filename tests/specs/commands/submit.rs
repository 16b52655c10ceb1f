//! `relay submit`: messages from a terminal or a file, each submitted once, and their outcomes.

use anyhow::{Result, ensure};
use serde_json::json;
use tests::World;

use super::{answering, ended, lines, relay};

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_submitted_once_however_often_it_is_sent() -> Result<()> {
    let world = World::new().await?;
    let submit = ["submit", "--conversation", "c 1", "--message-id", "m 1", "--create"];
    let (first, second) = (relay(&world, &submit, "hello\n").await?, relay(&world, &submit, "hello").await?);
    ended(&first, 0)?;
    ended(&second, 0)?;
    ensure!((first.stdout.as_str(), second.stdout.as_str()) == ("created m 1\n", "duplicate m 1\n"));
    let other = relay(&world, &submit, "another secret").await?;
    ended(&other, 1)?;
    ensure!(other.stderr.contains("message_id_conflict") && !other.stderr.contains("secret"), "{other:?}");
    ensure!(world.count("select count(*) from messages where content = 'hello'").await? == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_message_names_its_field_and_writes_nothing() -> Result<()> {
    let world = World::new().await?;
    world.create_conversation("c1").await?;
    let (long, large) = ("c".repeat(201), "x".repeat(300_000));
    let cases: [(&[&str], &str, i32, &str); 6] = [
        (&["--conversation", ""], "x", 64, "conversation_id must not be empty"),
        (&["--conversation", &long], "x", 64, "conversation_id must have at most 200 bytes"),
        (&["--conversation", "c1", "--message-id", ""], "x", 64, "message_id must not be empty"),
        (&["--conversation", "nobody"], "x", 1, "conversation_not_found"),
        (&["--conversation", "c1"], &large, 1, "content_too_large"),
        (&["--conversation", "c1"], "nul \0", 1, "content must not contain NUL"),
    ];
    for (args, content, code, what) in cases {
        let refused = relay(&world, &[&["submit"], args].concat(), content).await?;
        ended(&refused, code)?;
        ensure!(refused.stderr.contains(what), "{what}: {}", refused.stderr);
    }
    ensure!(world.count("select count(*) from messages").await? == 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_line_is_named_by_its_number_and_the_rest_goes_on() -> Result<()> {
    let world = World::new().await?;
    let line = |number: u32| {
        let (conversation_id, message_id) = (format!("c{}", number % 7), format!("m{number}"));
        json!({ "conversation_id": conversation_id, "message_id": message_id, "content": "secret" })
            .to_string()
    };
    let mut file: Vec<String> = (1..=1200).map(line).collect();
    file[99] = "secret, and no JSON".to_owned();
    file[599] = json!({ "conversation_id": "c1", "content": "secret", "message-id": "typo" }).to_string();
    file[699] =
        json!({ "conversation_id": "c1", "message_id": "m1", "content": "secret, other" }).to_string();
    file[799] = json!({ "conversation_id": "c1", "message_id": "nul", "content": "secret \0" }).to_string();
    let submit = ["submit", "--file", "-", "--create", "--json"];
    let first = relay(&world, &submit, &file.join("\n")).await?;
    ended(&first, 1)?;
    for bad in ["line 100: ", "line 600: ", "line 700: message_id_conflict", "line 800: content_invalid"] {
        ensure!(first.stderr.contains(bad), "{bad}: {}", first.stderr);
    }
    ensure!(!first.stderr.contains("secret"), "{}", first.stderr);
    ensure!(first.stderr.contains("line 600: message-id is no field of a message"), "{}", first.stderr);
    ensure!(lines(&first)? == [json!({ "created": 1196, "duplicates": 0, "refused": 2, "unparsable": 2 })]);

    let again = relay(&world, &submit, &file.join("\n")).await?;
    ended(&again, 1)?;
    ensure!(lines(&again)? == [json!({ "created": 0, "duplicates": 1196, "refused": 2, "unparsable": 2 })]);
    ensure!(world.count("select count(*) from messages").await? == 1196);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_does_not_make_conversations_unless_it_is_told_to() -> Result<()> {
    let world = World::new().await?;
    let line = json!({ "conversation_id": "c1", "content": "hello" }).to_string();
    ended(&relay(&world, &["submit", "--file", "-"], &line).await?, 1)?;
    ensure!(world.count("select count(*) from conversations").await? == 0);
    ended(&relay(&world, &["submit", "--file", "-", "--create"], &line).await?, 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_waits_gets_the_reply() -> Result<()> {
    let world = World::new().await?;
    let _processes = answering(&world).await?;
    let one = relay(&world, &["submit", "--conversation", "c1", "--create", "--wait", "hello"], "").await?;
    ended(&one, 0)?;
    ensure!(one.stdout == "echo: hello\n", "{one:?}");

    let file: Vec<String> = (0..50)
        .map(|n| json!({ "conversation_id": format!("f{n}"), "content": n.to_string() }).to_string())
        .collect();
    let many =
        relay(&world, &["submit", "--file", "-", "--create", "--wait", "--json"], &file.join("\n")).await?;
    ended(&many, 0)?;
    let outcomes = lines(&many)?;
    ensure!(outcomes.len() == 51, "an outcome for each line, and the sum: {outcomes:?}");
    for outcome in &outcomes[..50] {
        let said = outcome["line"].as_u64().map(|line| format!("echo: {}", line - 1));
        ensure!(outcome["outcome"] == "reply" && outcome["content"].as_str() == said.as_deref(), "{outcome}");
    }
    ensure!(outcomes[50]["outcomes"]["replies"] == 50, "{}", outcomes[50]);
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_waits_learns_of_an_error_and_of_an_absent_consumer() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', max_attempts = 1").await?;
    let nobody = ["submit", "--conversation", "c1", "--create", "--wait", "--timeout", "200ms", "hello"];
    let in_vain = relay(&world, &nobody, "").await?;
    ended(&in_vain, 1)?;
    ensure!(in_vain.stderr.contains("no outcome within 200ms"), "{in_vain:?}");
    ensure!(in_vain.stderr.contains("`relay status c1`"), "{in_vain:?}");

    let _relay = world.relay().start()?;
    let _consumer = world.consumer().env("ECHO_FAILURE_RATE", "1").start()?;
    let failed =
        relay(&world, &["submit", "--conversation", "c2", "--create", "--wait", "hello"], "").await?;
    ended(&failed, 1)?;
    let shown = world.answered("c2", 1).await?;
    ensure!(failed.stdout.is_empty() && failed.stderr.contains(&shown[0].content), "{failed:?}");
    let turn = format!("turn {} failed", shown[0].turn_id);
    ensure!(failed.stderr.contains(&turn), "{turn}: {failed:?}");
    let line = json!({ "conversation_id": "c2", "content": "again" }).to_string();
    let of_a_file = relay(&world, &["submit", "--file", "-", "--wait"], &line).await?;
    ended(&of_a_file, 1)?;
    let shown = world.answered("c2", 2).await?;
    ensure!(of_a_file.stdout.contains(&format!("error of turn {}", shown[1].turn_id)), "{of_a_file:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_of_another_agent_is_not_written_to_unawares() -> Result<()> {
    let world = World::new().await?;
    sqlx::query("insert into agents (name) values ('a'), ('b')").execute(&world.pool).await?;
    let to = ["submit", "--conversation", "c1", "--create"];
    ended(&relay(&world, &[&to[..], &["--agent", "a", "one"]].concat(), "").await?, 0)?;
    let other = relay(&world, &[&to[..], &["--agent", "b", "two"]].concat(), "").await?;
    ended(&other, 1)?;
    ensure!(
        other.stderr.contains("other_agent: the conversation c1 belongs to the agent a"),
        "the agent is named: {other:?}"
    );
    // Its own agent, and nobody's in particular, are as good as before.
    ended(&relay(&world, &[&to[..], &["--agent", "a", "three"]].concat(), "").await?, 0)?;
    ended(&relay(&world, &[&to[..], &["four"]].concat(), "").await?, 0)?;

    let file: Vec<String> = (0..20)
        .map(|n| json!({ "conversation_id": format!("c{n}"), "content": "five" }).to_string())
        .collect();
    let all = ["submit", "--file", "-", "--create", "--agent", "b", "--json"];
    let mixed = relay(&world, &all, &file.join("\n")).await?;
    ended(&mixed, 1)?;
    ensure!(mixed.stderr.contains("line 2: other_agent"), "{mixed:?}");
    ensure!(lines(&mixed)? == [json!({ "created": 19, "duplicates": 0, "refused": 1, "unparsable": 0 })]);
    ensure!(world.count("select count(*) from messages where conversation_id = 'c1'").await? == 3);
    ensure!(world.count("select count(*) from conversations where agent = 'b'").await? == 19);
    Ok(())
}
