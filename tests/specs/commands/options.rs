//! Every option of both programs, as their own help tells of it: none can be added and forgotten here.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::{Command, Output},
};

use anyhow::{Context, Result, ensure};
use tests::programs;

/// What help says of one option or argument.
#[derive(Debug, Default)]
struct Told {
    name: String,
    /// What stands in brackets: `N`, `DURATION`, `SIZE`, …
    value: String,
    text: String,
}

impl Told {
    fn variable(&self) -> Option<String> {
        let (_, rest) = self.text.split_once("[env: ")?;
        rest.split(['=', ']']).next().map(str::to_owned)
    }
}

/// What one command's help says.
struct Help {
    binary: &'static str,
    /// The words that name the command.
    words: Vec<String>,
    options: Vec<Told>,
}

/// Runs a program without anything of this process's environment: no command gets as far as a database.
fn run(binary: &str, args: &[String]) -> Result<Output> {
    Ok(Command::new(programs::workspace_binary(binary)?).args(args).env_clear().output()?)
}

fn helps(binary: &'static str, words: &[String], found: &mut Vec<Help>) -> Result<()> {
    let output = run(binary, &[words, &["--help".to_owned()]].concat())?;
    ensure!(output.status.success(), "{binary} {words:?}: {output:?}");
    let text = String::from_utf8(output.stdout)?;
    found.push(Help { binary, words: words.to_vec(), options: options(&text) });
    let commands = text.split_once("\nCommands:\n").map_or("", |(_, rest)| rest);
    let commands = commands.lines().take_while(|line| !line.is_empty());
    // A command stands two spaces from the edge, what is said of it further in.
    let names = commands.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    for name in names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
        helps(binary, &[words, &[name.to_owned()]].concat(), found)?;
    }
    Ok(())
}

fn all_helps() -> Result<Vec<Help>> {
    let mut found = Vec::new();
    for binary in ["relay", "consumer"] {
        helps(binary, &[], &mut found)?;
    }
    Ok(found)
}

fn options(help: &str) -> Vec<Told> {
    let mut options: Vec<Told> = Vec::new();
    for line in help.lines() {
        let line = line.trim();
        if let Some((_, long)) = line.split_once("--").filter(|(short, _)| {
            short.is_empty() || (short.starts_with('-') && short.trim_end().ends_with(','))
        }) {
            let (name, rest) = long.split_once(' ').unwrap_or((long, ""));
            let (value, text) = rest.split_once('>').unwrap_or(("", rest));
            let value = value.trim_start_matches(['<', '[']).to_owned();
            options.push(Told { name: name.to_owned(), value, text: format!("{text} ") });
        } else if let Some(option) = options.last_mut() {
            option.text.push_str(line);
            option.text.push(' ');
        }
    }
    options
}

/// The range that an option tells: `1 to 1000`, `10ms to 1m`.
fn range(text: &str) -> Option<(&str, &str)> {
    let word = |part: &str| part.starts_with(|first: char| first.is_ascii_digit());
    let words: Vec<&str> = text.split([' ', ',', ';', ':']).collect();
    words.windows(3).find_map(|three| match three {
        [from, "to", to] if word(from) && word(to) => Some((*from, to.trim_end_matches('.'))),
        _ => None,
    })
}

/// Values that are just out of a range, and its ends.
fn beyond(value: &str, from: &str, to: &str) -> (Vec<String>, [String; 2]) {
    let mut out = match value {
        "N" => vec![to.parse::<u64>().map_or_else(|_| "x".to_owned(), |to| (to + 1).to_string())],
        "SHARE" => vec!["1.001".to_owned(), "-0.001".to_owned()],
        "DURATION" => vec![format!("{to} 1ms")],
        _ => vec!["100PiB".to_owned()],
    };
    match (value, from.parse::<u64>()) {
        ("N", Ok(from)) if from > 0 => out.push((from - 1).to_string()),
        ("DURATION", _) if !from.starts_with('0') => out.push("1us".to_owned()),
        ("SIZE", _) if !from.starts_with('0') => out.push("1B".to_owned()),
        _ => {}
    }
    // Neither a number nor with a unit, and a bare number where a unit must stand.
    out.push("many".to_owned());
    if value == "DURATION" {
        out.push("5".to_owned());
    }
    (out, [from.to_owned(), to.to_owned()])
}

#[test]
fn every_number_duration_and_size_says_its_range_and_is_held_to_it() -> Result<()> {
    let mut tried = 0;
    for help in all_helps()? {
        for option in &help.options {
            if !matches!(option.value.as_str(), "N" | "DURATION" | "SIZE" | "SHARE") {
                continue;
            }
            let what = format!("{} {} --{}", help.binary, help.words.join(" "), option.name);
            let (from, to) = range(&option.text).with_context(|| format!("{what} tells no range"))?;
            let setting = option.variable().unwrap_or_else(|| format!("--{}", option.name));
            let (refused, accepted) = beyond(&option.value, from, to);
            let said = |given: &str| -> Result<(Option<i32>, String)> {
                let mut args = help.words.clone();
                // Options without an effect of their own are refused, so it gets the one that it needs.
                let needed: &[&str] = match option.name.as_str() {
                    "timeout" => &["--wait", "--conversation", "c"],
                    "last" => &["c"],
                    name if name.starts_with("echo-") => &["--handler", "echo"],
                    "handler-connect-timeout" => &["--handler", "http", "--handler-url", "http://a/"],
                    _ => &[],
                };
                args.extend(needed.iter().copied().map(str::to_owned));
                args.push(format!("--{}={given}", option.name));
                let output = run(help.binary, &args)?;
                Ok((output.status.code(), String::from_utf8(output.stderr)?))
            };
            for given in refused {
                let (code, stderr) = said(&given)?;
                ensure!(code == Some(64), "{what} {given}: {code:?} {stderr}");
                let about: Vec<&str> = stderr.lines().filter(|line| line.contains(&setting)).collect();
                ensure!(
                    about.iter().any(|line| line.contains(&format!("from {from} to {to}"))),
                    "{what} {given}: {stderr}"
                );
            }
            for given in accepted {
                let (_, stderr) = said(&given)?;
                ensure!(!stderr.contains(&format!("from {from} to {to}")), "{what} {given}: {stderr}");
            }
            tried += 1;
        }
    }
    ensure!(tried > 12, "only {tried} options were found");
    Ok(())
}

/// The rows of README's table of settings: whom a variable is for.
fn documented() -> Result<BTreeMap<String, BTreeSet<&'static str>>> {
    let readme = std::fs::read_to_string(programs::root().join("README.md"))?;
    let table = readme.split_once("| for | variable |").context("README has no table of settings")?.1;
    let mut documented = BTreeMap::new();
    for row in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let of: BTreeSet<&'static str> = match cells[0] {
            "both" => ["relay", "consumer"].into(),
            "relay" => ["relay"].into(),
            _ => ["consumer"].into(),
        };
        for variable in cells[1].split(", ") {
            documented.insert(variable.trim_matches('`').to_owned(), of.clone());
        }
    }
    Ok(documented)
}

#[test]
fn readme_names_every_variable_of_both_programs_and_no_other() -> Result<()> {
    let mut known: BTreeMap<String, BTreeSet<&'static str>> = BTreeMap::new();
    for help in all_helps()? {
        for variable in help.options.into_iter().filter_map(|option| option.variable()) {
            known.entry(variable).or_default().insert(help.binary);
        }
    }
    let documented = documented()?;
    ensure!(known.len() > 20, "{known:?}");
    ensure!(known == documented, "known: {known:#?}\ndocumented: {documented:#?}");
    Ok(())
}

#[test]
fn an_option_that_would_have_no_effect_is_refused() -> Result<()> {
    let cases: [(&str, &[&str], &str); 8] = [
        ("relay", &["submit", "--conversation", "c", "--timeout", "1s", "x"], "--wait"),
        ("relay", &["submit", "--conversation", "c", "--agent", "a", "x"], "--create"),
        ("relay", &["submit", "--file", "-", "--message-id", "m"], "--message-id"),
        ("relay", &["submit", "--file", "-", "content"], "CONTENT"),
        ("relay", &["status", "--last", "3"], "CONVERSATION"),
        ("relay", &["requeue", "--kind", "crash"], "--all"),
        ("relay", &["requeue", "--dry-run"], "--all"),
        (
            "consumer",
            &["run", "--handler", "http", "--handler-url", "http://a/", "--echo-delay", "1s"],
            "ECHO_DELAY",
        ),
    ];
    for (binary, args, named) in cases {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        let refused = run(binary, &args)?;
        let stderr = String::from_utf8(refused.stderr)?;
        ensure!(refused.status.code() == Some(64) && stderr.contains(named), "{args:?}: {stderr}");
    }
    Ok(())
}
