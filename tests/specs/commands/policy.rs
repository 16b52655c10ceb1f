//! `relay agent set`: the policy of an agent is changed as a whole or not at all, and the command knows what the table allows.

use anyhow::{Context, Result, ensure};
use tests::World;

use super::{ended, lines, relay};

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_set_as_a_whole_or_not_at_all() -> Result<()> {
    let world = World::new().await?;
    let made = relay(&world, &["agent", "set", "bot", "lease=20s", "paused=true", "--json"], "").await?;
    ended(&made, 0)?;
    let policy = lines(&made)?.remove(0);
    ensure!(
        policy["lease"] == "20s" && policy["paused"] == true && policy["debounce"] == "100ms",
        "{policy}"
    );
    ensure!(policy["outcome"] == "created", "{policy}");
    let said = async |changes: &[&str]| {
        let output = relay(&world, &[&["agent", "set", "bot"], changes].concat(), "").await?;
        ended(&output, 0)?;
        anyhow::Ok(output.stdout.lines().next().unwrap_or_default().to_owned())
    };
    ensure!(said(&["lease=30s"]).await? == "changed bot  (paused)");
    ensure!(said(&["lease=30s", "paused=true"]).await? == "unchanged bot  (paused)");
    ensure!(said(&["paused=false"]).await? == "changed bot");

    // All that is wrong at once, also what only the rest of the policy contradicts; and nothing of it is kept.
    let wrong = ["max_attempts=101", "leese=1s", "lease=1", "debounce=10s", "retry_backoff_max=10ms"];
    let refused =
        relay(&world, &[&["agent", "set", "bot", "dispatch_timeout=1m"], &wrong[..]].concat(), "").await?;
    ended(&refused, 64)?;
    for named in [
        "max_attempts must be a number from 1 to 100, not \"101\"",
        "\"leese\" is no key of an agent",
        "lease must be a duration such as 500ms, 10s or 5m, from 1s to 1h, not \"1\"",
        "debounce (10s) must not be over max_wait (2s)",
        "retry_backoff (1s) must not be over retry_backoff_max (10ms)",
    ] {
        ensure!(refused.stderr.contains(named), "{named}: {}", refused.stderr);
    }
    ensure!(world.count("select count(*) from agents where dispatch_timeout = '1 min'").await? == 0);
    let nobody = relay(&world, &["agent", "set", "typo", "lease=0s"], "").await?;
    ended(&nobody, 64)?;
    ensure!(world.count("select count(*) from agents where name = 'typo'").await? == 0);
    Ok(())
}

/// Each key of the help, with its least and its most.
async fn ranges(world: &World) -> Result<Vec<[String; 3]>> {
    let help = relay(world, &["agent", "set", "--help"], "").await?.stdout;
    let keys = help.split_once("Keys:\n").context("no keys")?.1;
    let rows = keys.lines().take_while(|line| !line.is_empty());
    Ok(rows
        .filter_map(|row| {
            let (range, to) = row.trim().split_once(" to ")?;
            let (key, from) = range.split_once(' ')?;
            Some([key, from.trim(), to].map(str::to_owned))
        })
        .collect())
}

/// Values just below and just above a range.
fn beyond([_, from, to]: &[String; 3]) -> Vec<String> {
    match (from.parse::<i64>(), to.parse::<i64>()) {
        (Ok(from), Ok(to)) => vec![(from - 1).to_string(), (to + 1).to_string()],
        _ => [format!("{to} 1us")]
            .into_iter()
            .chain(match from.as_str() {
                "1s" => Some("999999us".to_owned()),
                "500ms" => Some("499999us".to_owned()),
                "1ms" => Some("999us".to_owned()),
                _ => None,
            })
            .collect(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_and_the_table_agree_on_every_bound() -> Result<()> {
    let world = World::new().await?;
    let ranges = ranges(&world).await?;
    let columns: Vec<String> = sqlx::query_scalar(
        "select column_name::text from information_schema.columns
         where table_name = 'agents' and column_name not in ('name', 'paused') and table_schema = current_schema()",
    )
    .fetch_all(&world.pool)
    .await?;
    let (mut keys, mut of_table): (Vec<&str>, Vec<&str>) =
        (ranges.iter().map(|[key, ..]| key.as_str()).collect(), columns.iter().map(String::as_str).collect());
    keys.sort_unstable();
    of_table.sort_unstable();
    ensure!(keys == of_table, "{keys:?} {of_table:?}");

    for range in &ranges {
        let [key, from, to] = range;
        let tries = [(from.clone(), true), (to.clone(), true)];
        for (value, allowed) in tries.into_iter().chain(beyond(range).into_iter().map(|value| (value, false)))
        {
            // Nothing else of the policy is in the way.
            let room = "insert into agents (name, debounce, max_wait, retry_backoff, retry_backoff_max)
                values ('bot', '0', '1 h', '0', '7 d') on conflict (name) do update set debounce = '0',
                max_wait = '1 h', retry_backoff = '0', retry_backoff_max = '7 d'";
            sqlx::query(room).execute(&world.pool).await?;
            let set = relay(&world, &["agent", "set", "bot", &format!("{key}={value}")], "").await?;
            ended(&set, if allowed { 0 } else { 64 })?;
            ensure!(allowed || set.stderr.contains(&format!("from {from} to {to}")), "{set:?}");
            sqlx::query(room).execute(&world.pool).await?;
            // Postgres reads the same words.
            let update = format!("update agents set {key} = '{value}' where name = 'bot'");
            let written = sqlx::query(sqlx::AssertSqlSafe(update)).execute(&world.pool).await;
            ensure!(written.is_ok() == allowed, "{key} = {value}: {written:?}");
        }
    }
    Ok(())
}
