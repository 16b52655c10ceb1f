//! What somebody at a terminal, or a script, can rely on: outputs, exit codes, and that a mistake changes nothing.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tests::{World, world::Output};

/// Runs a command of the relay, with an input.
async fn relay(world: &World, args: &[&str], input: &str) -> Result<Output> {
    world.program("relay").args(args.iter().copied()).output(input).await
}

/// Fails unless the command ended with this code; shows what it said otherwise.
fn ended(output: &Output, code: i32) -> Result<()> {
    ensure!(output.code == Some(code), "{output:?}");
    Ok(())
}

fn lines(output: &Output) -> Result<Vec<Value>> {
    Ok(output.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// A world whose turns are answered at once.
async fn answering(world: &World) -> Result<(tests::Process, tests::Process)> {
    world.policy("debounce = '0'").await?;
    Ok((world.relay().start()?, world.consumer().start()?))
}

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

    let _relay = world.relay().start()?;
    let _consumer = world.consumer().env("ECHO_FAILURE_RATE", "1").start()?;
    let failed =
        relay(&world, &["submit", "--conversation", "c2", "--create", "--wait", "hello"], "").await?;
    ended(&failed, 1)?;
    let shown = world.answered("c2", 1).await?;
    ensure!(failed.stdout.is_empty() && failed.stderr.contains(&shown[0].content), "{failed:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_what_is_known_of_a_conversation_and_of_the_pipeline() -> Result<()> {
    let world = World::new().await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "red \u{1b}[31m\nline").await?;
    let page = relay(&world, &["status", "c1"], "").await?;
    ended(&page, 0)?;
    ensure!(page.stdout.contains("status        waiting for"), "{}", page.stdout);
    ensure!(
        page.stdout.contains("red \\u{1b}[31m\\nline"),
        "a message must not steer the terminal: {}",
        page.stdout
    );

    let pipeline = lines(&relay(&world, &["status", "--json"], "").await?)?;
    ensure!(pipeline[0]["agents"]["default"]["waiting"] == 1, "{pipeline:?}");
    let conversation = lines(&relay(&world, &["status", "c1", "--json"], "").await?)?;
    ensure!(
        conversation[0]["status"] == "waiting" && conversation[0]["messages"][0]["seq"] == 1,
        "{conversation:?}"
    );

    let missing = relay(&world, &["status", "c2"], "").await?;
    ended(&missing, 1)?;
    ensure!(missing.stderr == "error: there is no conversation c2\n", "{missing:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_set_as_a_whole_or_not_at_all() -> Result<()> {
    let world = World::new().await?;
    let made = relay(&world, &["agent", "set", "bot", "lease=20s", "paused=true", "--json"], "").await?;
    ended(&made, 0)?;
    let policy = lines(&made)?.remove(0);
    ensure!(
        policy[0]["lease"] == "20s" && policy[0]["paused"] == true && policy[0]["debounce"] == "100ms",
        "{policy}"
    );

    let cases: [(&[&str], &[&str]); 4] = [
        (&["max_attempts=3", "leese=1s", "lease=1"], &["leese", "lease must be a duration"]),
        (&["max_attempts=3", "lease=10ms"], &["lease >= '00:00:01'"]),
        (&["max_attempts=3", "debounce=10s"], &["debounce <= max_wait"]),
        (&["max_attempts=3", "max_attempts=4"], &["max_attempts is given twice"]),
    ];
    for (changes, named) in cases {
        let refused = relay(&world, &[&["agent", "set", "bot"], changes].concat(), "").await?;
        ended(&refused, 64)?;
        ensure!(named.iter().all(|what| refused.stderr.contains(what)), "{}", refused.stderr);
    }
    ensure!(world.count("select max_attempts::bigint from agents where name = 'bot'").await? == 5);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_problem_of_a_configuration_is_reported_at_once() -> Result<()> {
    let world = World::new().await?;
    let relay = world.program("relay").args([
        "run",
        "--batch",
        "0",
        "--database-url",
        "postgres://app:hunter2@db/app",
    ]);
    let refused = relay.env("POLL_INTERVAL", "1h").env("NATS_KEY", "/nowhere").output("").await?;
    ended(&refused, 64)?;
    for setting in ["RELAY_BATCH", "DATABASE_URL", "POLL_INTERVAL", "NATS_KEY", "NATS_CERT"] {
        ensure!(refused.stderr.contains(&format!("\n  {setting}: ")), "{setting}: {}", refused.stderr);
    }
    ensure!(!refused.stderr.contains("hunter2"), "{}", refused.stderr);

    let consumer = world.program("consumer").args(["run", "--concurrency", "0"]).output("").await?;
    ended(&consumer, 64)?;
    ensure!(
        consumer.stderr.contains("HANDLER: ") && consumer.stderr.contains("CONCURRENCY: "),
        "{consumer:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_start_says_why_once() -> Result<()> {
    let world = World::new().await?;
    let without_nats = world.relay().env("NATS_URL", "nats://127.0.0.1:1").output("").await?;
    ended(&without_nats, 1)?;
    ensure!(without_nats.stderr.matches("cannot connect to NATS").count() == 1, "{without_nats:?}");
    let without_postgres =
        world.relay().env("DATABASE_URL", "postgres://127.0.0.1:1/none").output("").await?;
    ended(&without_postgres, 1)?;
    ensure!(
        without_postgres.stderr.matches("cannot connect to Postgres").count() == 1,
        "{without_postgres:?}"
    );
    sqlx::query("drop table _sqlx_migrations").execute(&world.pool).await?;
    for binary in [world.relay(), world.consumer()] {
        let unmigrated = binary.output("").await?;
        ended(&unmigrated, 1)?;
        ensure!(unmigrated.stderr.matches("relay migrate").count() == 1, "{unmigrated:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_cuts_short_and_gives_back_what_runs() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    world.create_conversation("c1").await?;
    let _relay = world.relay().start()?;
    let slow = world.consumer().env("ECHO_DELAY", "1h").env("DRAIN_TIMEOUT", "1h").start()?;
    world.submit("c1", "hello").await?;
    world.eventually("it runs", async || Ok(world.lane("c1").await?.state == "running")).await?;
    slow.terminate()?;
    // It waits for what runs, and says that it takes no more.
    world
        .eventually("it is stopping", async || {
            Ok(slow.get("/readyz").await?.1.contains(r#""stopping":true"#))
        })
        .await?;
    ensure!(world.lane("c1").await?.state == "running");
    slow.shut_down().await?;
    ensure!(world.count("select count(*) from agent_runs where outcome = 'released'").await? == 1);
    let _successor = world.consumer().start()?;
    world.answered("c1", 1).await?;
    world.settled().await
}
