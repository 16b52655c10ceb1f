//! Ids are the application's: any text of 1 to 200 bytes is served like any other, all the way.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use anyhow::{Result, ensure};
use consumer::{Reply, Turn, handler_fn};
use shared::settings::Source;
use tests::World;

use super::{session, submit};

/// Texts that break somebody's subject, path, log line or SQL.
fn nasty() -> Vec<String> {
    let texts = [
        " ",
        ".",
        "..",
        "a.b",
        "*",
        ">",
        "a.*.>",
        "$JS.API.>",
        "$",
        "~",
        "~0",
        "-",
        "_",
        "'",
        "\"",
        "\\",
        "%",
        "%s",
        "\n",
        "\r\n",
        "a\nb: c",
        "\t",
        "\u{1}",
        "\u{7f}",
        "\u{85}",
        "\u{feff}",
        "\u{200b}",
        "\u{202e}",
        "é",
        "e\u{301}",
        "ﬃ",
        "İ",
        "ß",
        "日本語",
        "🦀",
        "👩‍👩‍👧‍👦",
        "\u{10ffff}",
        "\u{fffd}",
        "null",
        "default",
        "a b",
        " a",
        "a ",
        "{}",
        "[1]",
        "/../../etc/passwd",
        "'; drop table messages; --",
    ];
    let mut texts: Vec<String> = texts.map(String::from).to_vec();
    texts.extend(["x".repeat(64), "x".repeat(65), "x".repeat(200), "🦀".repeat(50), "é".repeat(100)]);
    texts.push(format!("{}.{}", "x".repeat(99), "y".repeat(100)));
    texts
}

/// Texts of any characters and lengths, always the same ones.
fn arbitrary(count: usize) -> Vec<String> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |below: u32| {
        // xorshift: plenty for a list of texts.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        u32::try_from(state >> 33).unwrap_or(0) % below
    };
    let mut text = || {
        let bytes = next(200) + 1;
        let top = [0x80, 0x800, 0x1_0000, 0x11_0000][next(4) as usize];
        let mut text = String::new();
        while let Some(c) = char::from_u32(next(top).max(1)).or(Some('x')) {
            if text.len() + c.len_utf8() > bytes as usize {
                break;
            }
            text.push(c);
        }
        if text.is_empty() { "x".into() } else { text }
    };
    std::iter::repeat_with(&mut text).take(count).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_of_any_text_are_served_like_any_other() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let world = World::new().await?;
        world.policy("debounce = '0'").await?;
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        let handler = handler_fn({
            let seen = seen.clone();
            move |turn: Turn| {
                let said: Vec<_> = turn.messages.iter().map(|m| m.id.as_str().to_owned()).collect();
                let conversation = turn.conversation_id.as_str().to_owned();
                seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert((conversation, said));
                async { Ok(Reply::new("yes")) }
            }
        });
        let _relay = if source == Source::Nats { Some(world.local_relay().await?) } else { None };
        let _consumer = world.local_consumer(world.consumer_settings(source), handler).await?;
        let ids: BTreeSet<String> = nasty().into_iter().chain(arbitrary(150)).collect();
        let mut app = session(&world).await?;
        for id in &ids {
            world.create_conversation(id).await?;
            ensure!(submit(&mut app, id, id, "hello").await == "created", "{id:?}");
            ensure!(submit(&mut app, id, id, "hello").await == "duplicate", "{id:?}");
        }
        world.settled().await?;
        let seen = seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let wanted: BTreeSet<_> = ids.iter().map(|id| (id.clone(), vec![id.clone()])).collect();
        ensure!(seen == wanted, "not as submitted: {:?}", seen.symmetric_difference(&wanted));
        let replies = "select count(*) from messages where role = 'assistant'";
        ensure!(world.count(replies).await? == i64::try_from(ids.len())?);
    }
    Ok(())
}
