use std::{fs, time::Duration};

use clap::{Args, Command};

use super::*;

/// Reads flags as a process would, without this process's environment.
fn flags<A: Args>(flags: &[&str]) -> A {
    let command = A::augment_args(Command::new("process")).mut_args(|arg| arg.env(None::<&str>));
    let given = command.try_get_matches_from([&["process"], flags].concat()).unwrap();
    A::from_arg_matches(&given).unwrap()
}

fn settings_of(problems: &SettingsError) -> Vec<&'static str> {
    problems.problems.iter().map(|problem| problem.setting).collect()
}

#[test]
fn every_problem_is_reported_at_once() {
    let relay: RelayArgs = flags(&["--batch", "0", "--max-in-flight", "many", "--poll-interval", "5"]);
    let database: DatabaseArgs = flags(&[]);
    let nats: NatsArgs = flags(&["--stream", "a.b", "--subject-prefix", "agent.>", "--nats-key", "/nowhere"]);
    let error =
        check(|checks| (database.check(checks), nats.check(checks), relay.check(checks))).unwrap_err();
    assert_eq!(
        settings_of(&error),
        [
            "DATABASE_URL",
            "NATS_KEY",
            "NATS_CERT",
            "STREAM",
            "SUBJECT_PREFIX",
            "RELAY_BATCH",
            "RELAY_MAX_IN_FLIGHT",
            "POLL_INTERVAL",
        ]
    );
    assert!(
        error.to_string().contains("\n  RELAY_BATCH: must be a number from 1 to 1000, not \"0\""),
        "{error}"
    );
}

#[test]
fn what_is_not_given_has_its_default() {
    let (relay, nats): (RelayArgs, NatsArgs) = (flags(&["--name", "r1"]), flags(&["--stream", " "]));
    let (relay, nats) = check(|checks| (relay.check(checks), nats.check(checks))).unwrap();
    assert_eq!(
        relay,
        RelaySettings {
            name: "r1".to_owned(),
            batch: 100,
            max_in_flight: 1024,
            poll_interval: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(10),
        }
    );
    assert_eq!(nats.urls, ["nats://127.0.0.1:4222"]);
    assert_eq!((nats.stream.as_str(), nats.subject_prefix.as_str()), ("AGENT_TURNS", "agent.turns"));
    assert_eq!((nats.replicas, nats.max_bytes), (1, Some(1 << 30)));
}

#[test]
fn durations_and_sizes_carry_their_units() {
    let nats: NatsArgs = flags(&["--stream-max-bytes", "64MiB"]);
    let unlimited: NatsArgs = flags(&["--stream-max-bytes", "unlimited"]);
    let relay: RelayArgs = flags(&["--poll-interval", "500ms", "--drain-timeout", "5m"]);
    let (nats, unlimited, relay) =
        check(|checks| (nats.check(checks), unlimited.check(checks), relay.check(checks))).unwrap();
    assert_eq!((nats.max_bytes, unlimited.max_bytes), (Some(64 << 20), None));
    assert_eq!(
        (relay.poll_interval, relay.drain_timeout),
        (Duration::from_millis(500), Duration::from_mins(5))
    );
}

#[test]
fn an_unnamed_process_gets_a_name_of_its_own() {
    let consumer: ConsumerArgs = flags(&["--handler", "echo"]);
    let consumer = check(|checks| consumer.check(checks)).unwrap();
    assert!(consumer.name.ends_with(&std::process::id().to_string()), "{}", consumer.name);
}

#[test]
fn settings_of_the_other_handler_are_refused() {
    let http: ConsumerArgs =
        flags(&["--handler", "http", "--echo-delay", "1s", "--echo-failure-rate", "0.5"]);
    let error = check(|checks| http.check(checks)).unwrap_err();
    assert_eq!(settings_of(&error), ["ECHO_DELAY", "ECHO_FAILURE_RATE", "HANDLER_URL"]);

    let echo: ConsumerArgs = flags(&["--handler", "echo", "--handler-url", "http://agent/"]);
    assert_eq!(settings_of(&check(|checks| echo.check(checks)).unwrap_err()), ["HANDLER_URL"]);
}

#[test]
fn nobody_answers_users_with_an_echo_by_accident() {
    let consumer: ConsumerArgs = flags(&[]);
    assert_eq!(settings_of(&check(|checks| consumer.check(checks)).unwrap_err()), ["HANDLER"]);
}

#[test]
fn a_password_on_the_command_line_is_refused_and_not_repeated() {
    let database: DatabaseArgs = flags(&["--database-url", "postgres://app:hunter2@db/app"]);
    let nats: NatsArgs = flags(&["--nats-url", "nats://hunter2@broker:4222"]);
    let error = check(|checks| (database.check(checks), nats.check(checks))).unwrap_err();
    assert_eq!(settings_of(&error), ["DATABASE_URL", "NATS_URL"]);
    assert!(!format!("{error} {error:?} {database:?} {nats:?}").contains("hunter2"));
}

#[test]
fn secrets_come_from_files_and_show_in_no_debug_output() {
    let directory = std::env::temp_dir().join(format!("settings-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let (database_url, nats_url) = (directory.join("database"), directory.join("nats"));
    fs::write(&database_url, "postgres://app:hunter2@db/app\n").unwrap();
    fs::write(&nats_url, "nats://app:hunter2@one:4222, tls://two:4222\n").unwrap();

    let database: DatabaseArgs = flags(&["--database-url-file", database_url.to_str().unwrap()]);
    let nats: NatsArgs = flags(&["--nats-url-file", nats_url.to_str().unwrap()]);
    let both: DatabaseArgs = flags(&[
        "--database-url",
        "postgres://db/app",
        "--database-url-file",
        database_url.to_str().unwrap(),
    ]);
    let settings = check(|checks| (database.check(checks), nats.check(checks)));
    let twice = check(|checks| both.check(checks));
    fs::remove_dir_all(&directory).unwrap();

    let (database, nats) = settings.unwrap();
    assert_eq!(database.url, "postgres://app:hunter2@db/app");
    assert_eq!(nats.urls, ["nats://app:hunter2@one:4222", "tls://two:4222"]);
    assert!(!format!("{database:?} {nats:?}").contains("hunter2"));
    assert_eq!(settings_of(&twice.unwrap_err()), ["DATABASE_URL"]);
}

#[test]
fn each_setting_has_the_variable_and_the_flag_that_the_contract_names() {
    let of_all = |command: Command| {
        NatsArgs::augment_args(DatabaseArgs::augment_args(AdminArgs::augment_args(LogArgs::augment_args(
            command,
        ))))
    };
    let relay = of_all(RelayArgs::augment_args(Command::new("relay")));
    let consumer = of_all(ConsumerArgs::augment_args(Command::new("consumer")));
    let shared = "DATABASE_URL DATABASE_URL_FILE NATS_URL NATS_URL_FILE NATS_CREDS NATS_CA NATS_CERT NATS_KEY STREAM \
                  SUBJECT_PREFIX STREAM_REPLICAS STREAM_MAX_BYTES LOG_FORMAT RUST_LOG ADMIN_ADDR POLL_INTERVAL \
                  DRAIN_TIMEOUT";
    let of_relay = "RELAY_NAME RELAY_BATCH RELAY_MAX_IN_FLIGHT";
    let of_consumer = "CONSUMER_NAME SOURCE AGENT CONCURRENCY HISTORY_LIMIT HANDLER HANDLER_URL OPERATIONS_URL \
                       HANDLER_CONNECT_TIMEOUT ECHO_DELAY ECHO_FAILURE_RATE ECHO_REPLY_BYTES";
    for (command, of_process, prefix) in [(relay, of_relay, "RELAY_"), (consumer, of_consumer, "CONSUMER_")] {
        let mut given: Vec<(String, String)> = command
            .get_arguments()
            .map(|arg| {
                (arg.get_env().unwrap().to_str().unwrap().to_owned(), arg.get_long().unwrap().to_owned())
            })
            .collect();
        let mut named: Vec<(String, String)> = [shared, of_process]
            .iter()
            .flat_map(|names| names.split_whitespace())
            .map(|name| (name.to_owned(), name.trim_start_matches(prefix).to_lowercase().replace('_', "-")))
            .collect();
        given.sort();
        named.sort();
        assert_eq!(given, named);
    }
}
