//! What a world's sessions ran, as `auto_explain` has written it to the server's log: the real text, the real plan, and how
//! much each scan really read.

use std::{
    collections::HashSet,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::World;

/// Tables that grow. The others have a row an agent or a process.
const GROWING: [&str; 6] =
    ["conversations", "messages", "agent_outbox", "agent_lanes", "agent_runs", "operations"];

/// One statement that was run.
#[derive(Debug)]
pub(super) struct Explained {
    pub(super) text: String,
    /// Pages touched.
    pub(super) buffers: u64,
    /// Of tables that grow.
    pub(super) scans: Vec<Scan>,
}

/// One scan of a table that grows.
#[derive(Debug)]
pub(super) struct Scan {
    pub(super) kind: String,
    pub(super) table: String,
    pub(super) index: String,
    pub(super) by_index: bool,
    /// Read in all loops, those that a filter threw away included.
    pub(super) rows: f64,
}

/// The server's log, as far as it tells of one world's pipeline.
pub(super) struct Log<'a> {
    world: &'a World,
    path: PathBuf,
    offset: u64,
    /// This test's own sessions.
    own: HashSet<i32>,
    database: String,
}

impl<'a> Log<'a> {
    /// From now on every statement of every new session is explained.
    pub(super) async fn open(world: &'a World) -> Result<Self> {
        let (database, data): (String, String) =
            sqlx::query_as("select current_database()::text, current_setting('data_directory')")
                .fetch_one(&world.pool)
                .await?;
        for (setting, value) in [
            ("session_preload_libraries", "auto_explain"),
            ("auto_explain.log_min_duration", "0"),
            ("auto_explain.log_analyze", "on"),
            ("auto_explain.log_buffers", "on"),
            ("auto_explain.log_timing", "off"),
            ("auto_explain.log_format", "json"),
            ("auto_explain.log_nested_statements", "on"),
        ] {
            let alter = format!("alter database \"{database}\" set {setting} = '{value}'");
            sqlx::query(sqlx::AssertSqlSafe(alter)).execute(&world.pool).await?;
        }
        let path = Path::new(&data).parent().context("no directory")?.join("log");
        let mut log = Self { world, path, offset: 0, own: HashSet::new(), database };
        log.skip().await?;
        Ok(log)
    }

    /// Leaves out what was run until now.
    pub(super) async fn skip(&mut self) -> Result<()> {
        self.offset = std::fs::metadata(&self.path).with_context(|| self.path.display().to_string())?.len();
        self.note_own_sessions().await
    }

    async fn note_own_sessions(&mut self) -> Result<()> {
        let pids: Vec<i32> = sqlx::query_scalar(
            "select pid from pg_stat_activity where datname = current_database() and application_name = 'test'",
        )
        .fetch_all(&self.world.pool)
        .await?;
        self.own.extend(pids);
        Ok(())
    }

    /// What was run since the last call, but for what the server is writing at this moment.
    pub(super) async fn read(&mut self) -> Result<Vec<Explained>> {
        self.note_own_sessions().await?;
        let mut file = std::fs::File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let whole = whole_entries(&bytes);
        self.offset += u64::try_from(whole.len())?;
        let text = String::from_utf8_lossy(whole);
        let mut lines = text.lines().peekable();
        let mut statements = Vec::new();
        while let Some(line) = lines.next() {
            let mut json = String::new();
            while let Some(more) = lines.next_if(|line| line.starts_with('\t')) {
                json.push_str(more);
            }
            if line.ends_with("plan:") && self.is_of_pipeline(line) {
                statements.push(explained(&serde_json::from_str(&json).context(json)?));
            }
        }
        ensure!(!statements.is_empty(), "nothing was explained");
        Ok(statements)
    }

    /// A line begins with its time, its pid in brackets and its database.
    fn is_of_pipeline(&self, line: &str) -> bool {
        let Some((pid, rest)) = line.split_once('[').and_then(|(_, rest)| rest.split_once("] ")) else {
            return false;
        };
        rest.starts_with(&format!("{} ", self.database))
            && pid.parse().is_ok_and(|pid: i32| !self.own.contains(&pid))
    }
}

/// Without the last entry, unless its plan is there to its closing brace: the server may be amid its write.
fn whole_entries(log: &[u8]) -> &[u8] {
    const END: &[u8] = b"\n\t}\n";
    if log.ends_with(END) {
        return log;
    }
    let lines = log.split_inclusive(|byte| *byte == b'\n');
    let mut start = 0;
    let mut last = 0;
    for line in lines {
        if !line.starts_with(b"\t") {
            last = start;
        }
        start += line.len();
    }
    &log[..last]
}

fn explained(entry: &Value) -> Explained {
    let root = &entry["Plan"];
    let mut scans = Vec::new();
    walk(root, &mut scans);
    Explained {
        text: entry["Query Text"].as_str().unwrap_or_default().to_owned(),
        buffers: ["Shared Hit Blocks", "Shared Read Blocks"]
            .iter()
            .filter_map(|key| root[key].as_u64())
            .sum(),
        scans,
    }
}

fn walk(node: &Value, scans: &mut Vec<Scan>) {
    let kind = node["Node Type"].as_str().unwrap_or_default();
    if let Some(table) = node["Relation Name"].as_str()
        && GROWING.contains(&table)
        && kind != "ModifyTable"
    {
        let number = |key: &str| node[key].as_f64().unwrap_or_default();
        let rows = number("Actual Rows")
            + number("Rows Removed by Filter")
            + number("Rows Removed by Index Recheck");
        scans.push(Scan {
            kind: kind.to_owned(),
            table: table.to_owned(),
            index: node["Index Name"].as_str().unwrap_or("nothing").to_owned(),
            by_index: matches!(kind, "Index Scan" | "Index Only Scan"),
            rows: rows * number("Actual Loops"),
        });
    }
    for child in node["Plans"].as_array().into_iter().flatten() {
        walk(child, scans);
    }
}

#[test]
fn an_entry_that_is_half_written_is_left_for_later() {
    let before = b"time [1] db LOG:  plan:\n\t{\n\t  \"Plan\": {\n\t  }\n\t}\n";
    let next = b"time [2] db LOG:  plan:\n\t{\n\t  \"Plan\": {\n\t  }\n\t}\n";
    for cut in 0..next.len() {
        let log = [before.as_slice(), &next[..cut]].concat();
        assert_eq!(whole_entries(&log), before, "{cut}");
    }
    let log = [before.as_slice(), next].concat();
    assert_eq!(whole_entries(&log), log);
    assert_eq!(whole_entries(b"time [2] db LOG:  something else\n\tsecond line\n"), b"");
}
