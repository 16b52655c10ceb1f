//! The pipeline: the lanes of each agent by what they do, and what stands still.

use std::{collections::BTreeMap, io::Write};

use serde::Serialize;
use sqlx::PgConnection;

use super::{
    super::{CommandError, agent, output},
    SHOWN,
    sql::{self, Due, Lanes},
    waits::NOT_YET_LATE,
};

/// The lanes of one agent that are not idle.
#[derive(Debug, Default, Serialize)]
struct AgentLanes {
    paused: bool,
    waiting: i64,
    retrying: i64,
    queued: i64,
    running: i64,
    /// Running, with a lease that is over.
    recovering: i64,
    /// Consumers whose leases are alive. Postgres knows no others: an idle consumer leaves no trace here.
    workers: i64,
    /// For how long the first of the waiting has been due; absent: nothing is.
    #[serde(skip_serializing_if = "Option::is_none")]
    unclaimed_seconds: Option<f64>,
    /// For how long the first of the queued has been queued.
    #[serde(skip_serializing_if = "Option::is_none")]
    unbegun_seconds: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Pipeline {
    agents: BTreeMap<String, AgentLanes>,
    /// There are more lanes of a state than were counted.
    capped: bool,
    longest_due: Vec<Due>,
    asleep: Vec<String>,
}

pub(super) async fn read(connection: &mut PgConnection) -> Result<Pipeline, CommandError> {
    let known = agent::sql::agents(connection).await?;
    let mut agents: BTreeMap<String, AgentLanes> = known
        .into_iter()
        .map(|agent| (agent.name, AgentLanes { paused: agent.paused, ..AgentLanes::default() }))
        .collect();
    for lanes in sql::lanes(connection).await? {
        agents.entry(lanes.agent.clone()).or_default().count(&lanes);
    }
    let total = |count: fn(&AgentLanes) -> i64| agents.values().map(count).sum::<i64>();
    let totals =
        [total(|of| of.waiting + of.retrying), total(|of| of.queued), total(|of| of.running + of.recovering)];
    Ok(Pipeline {
        capped: totals.contains(&sql::COUNTED),
        agents,
        longest_due: sql::longest_due(connection).await?,
        asleep: sql::asleep(connection).await?,
    })
}

impl AgentLanes {
    fn count(&mut self, lanes: &Lanes) {
        let untroubled = lanes.count - lanes.troubled;
        match lanes.state.as_str() {
            "waiting" => {
                (self.waiting, self.retrying) = (untroubled, lanes.troubled);
                self.unclaimed_seconds = Some(lanes.overdue_seconds).filter(|seconds| *seconds > 0.0);
            }
            "queued" => (self.queued, self.unbegun_seconds) = (lanes.count, lanes.claimed_seconds),
            _ => (self.running, self.recovering, self.workers) = (untroubled, lanes.troubled, lanes.workers),
        }
    }

    /// What keeps this agent's lanes from going on, as far as the database can tell.
    fn trouble(&self, name: &str) -> String {
        let late = |seconds: Option<f64>| seconds.filter(|seconds| *seconds >= NOT_YET_LATE).map(output::age);
        let mut notes = Vec::new();
        if self.paused {
            notes.push(format!("paused: relay agent set {name} paused=false"));
        } else if let Some(age) = late(self.unclaimed_seconds) {
            notes.push(format!("due for {age}, and nobody has claimed it: does a relay run?"));
        }
        match (late(self.unbegun_seconds), self.workers) {
            (Some(age), 0) => {
                notes.push(format!(
                    "queued for {age}, and nobody has begun it: does a consumer of {name} run?"
                ));
            }
            (Some(age), 1) => notes.push(format!("queued for {age}: its consumer is busy")),
            (Some(age), workers) => notes.push(format!("queued for {age}: its {workers} consumers are busy")),
            (None, _) => {}
        }
        if self.recovering > 0 {
            notes.push("a consumer was lost".to_owned());
        }
        notes.join("; ")
    }
}

impl Pipeline {
    pub(super) fn print(&self, out: &mut dyn Write) -> Result<(), CommandError> {
        let rows: Vec<[String; 8]> = self
            .agents
            .iter()
            .map(|(name, of)| {
                let counts = [of.waiting, of.retrying, of.queued, of.running, of.recovering, of.workers];
                let [waiting, retrying, queued, running, recovering, workers] =
                    counts.map(|count| count.to_string());
                let trouble = of.trouble(name);
                [name.clone(), waiting, retrying, queued, running, recovering, workers, trouble]
            })
            .collect();
        let head = ["agent", "waiting", "retrying", "queued", "running", "recovering", "busy consumers", ""];
        output::table(out, head, &rows)?;
        if self.capped {
            writeln!(out, "(of each state only the {} lanes that are due first)", sql::COUNTED)?;
        }
        writeln!(out)?;
        if self.longest_due.is_empty() {
            writeln!(out, "due     nothing")?;
        }
        for due in &self.longest_due {
            let (age, conversation) =
                (output::age(due.for_seconds), output::shown(&due.conversation_id, SHOWN));
            let what = match due.state.as_str() {
                "waiting" => "to be claimed",
                "queued" => "queued, to be asked for",
                _ => "to be recovered, its lease is over",
            };
            writeln!(out, "due     for {age} {what}: {conversation}")?;
        }
        let asleep = if self.asleep.is_empty() { "nobody".to_owned() } else { self.asleep.join(", ") };
        writeln!(out, "asleep  {}", output::shown(&asleep, 1000))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_consumer_is_told_from_an_absent_one() {
        let queued = AgentLanes { queued: 1, unbegun_seconds: Some(40.0), ..AgentLanes::default() };
        let absent = queued.trouble("bot");
        assert_eq!(absent, "queued for 40s, and nobody has begun it: does a consumer of bot run?");
        let busy = AgentLanes { running: 64, workers: 1, ..queued };
        assert_eq!(busy.trouble("bot"), "queued for 40s: its consumer is busy");
        let fresh = AgentLanes { unbegun_seconds: Some(0.1), ..busy };
        assert_eq!(fresh.trouble("bot"), "");
    }

    #[test]
    fn what_is_paused_is_not_called_unclaimed() {
        let due = AgentLanes { waiting: 1, unclaimed_seconds: Some(40.0), ..AgentLanes::default() };
        assert_eq!(due.trouble("bot"), "due for 40s, and nobody has claimed it: does a relay run?");
        let paused = AgentLanes { paused: true, ..due };
        assert_eq!(paused.trouble("bot"), "paused: relay agent set bot paused=false");
    }
}
