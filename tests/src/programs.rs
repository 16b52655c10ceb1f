//! Where the programs are, and how one is started so that it cannot outlive its parent.

use std::{
    env,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use anyhow::{Context, Result, bail};

/// The user that servers run as when root starts them: they refuse to run as root.
const SERVER_USER: &str = "postgres";

/// The workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/")).to_owned()
}

/// Whether servers must change the user.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A command that gets `signal` when the thread that starts it ends, and a process group of its own, so that a
/// terminal's Ctrl-C reaches it only through its parent.
pub fn subordinate(program: &Path, signal: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", signal]).arg(program).process_group(0);
    command
}

/// The same, as the user that servers run as.
pub fn subordinate_server(program: &Path, signal: &str) -> Command {
    if !is_root() {
        return subordinate(program, signal);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", SERVER_USER, "--regid", SERVER_USER, "--init-groups", "--pdeathsig", signal]);
    command.arg(program).process_group(0);
    command
}

/// Makes a directory that servers can write to.
pub fn server_directory(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    if is_root() {
        let status = Command::new("chown").arg(SERVER_USER).arg(path).status().context("cannot run chown")?;
        if !status.success() {
            bail!("cannot give {} to the user {SERVER_USER}: is PostgreSQL installed?", path.display());
        }
    }
    Ok(())
}

/// The directory of PostgreSQL's programs, which Debian keeps out of `PATH`: the newest one installed.
pub fn postgres_bin() -> Result<PathBuf> {
    let mut installed: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .filter(|(_, bin)| bin.join("initdb").exists())
        .collect();
    installed.sort();
    match installed.pop() {
        Some((_, bin)) => Ok(bin),
        None => in_path("initdb")
            .and_then(|initdb| Some(initdb.parent()?.to_owned()))
            .context("PostgreSQL is missing: run ./dev setup"),
    }
}

/// The programs of `PostgreSQL` 18. `None`, said loudly: they are not installed here; in CI that is an error.
pub fn postgres_18_bin() -> Result<Option<PathBuf>> {
    wanted("PostgreSQL 18", installed("POSTGRES_18_BIN", "postgres-18/native/bin"))
}

/// The newest nats-server that is supported, or whichever `PATH` has.
pub fn nats_server() -> Result<PathBuf> {
    let newest = installed("NATS_SERVER", "nats-server/bin/nats-server");
    newest.or_else(|| in_path("nats-server")).context("nats-server is missing: run ./dev setup")
}

/// The oldest nats-server that is supported. `None`, said loudly: it is not installed here; in CI that is an error.
pub fn nats_server_oldest() -> Result<Option<PathBuf>> {
    wanted("the oldest nats-server", installed("NATS_SERVER_OLDEST", "nats-server-oldest/bin/nats-server"))
}

/// `PgBouncer`.
pub fn pgbouncer() -> Result<PathBuf> {
    in_path("pgbouncer").context("PgBouncer is missing: run ./dev setup")
}

/// The library that shows its process another time. `None`, said loudly: it is not installed here; in CI that is an error.
pub fn faketime() -> Result<Option<PathBuf>> {
    let architectures = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let library = architectures.map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
    wanted("a skewed clock (faketime)", library.filter(|library| library.exists()).min())
}

/// What `./dev setup` has installed under `.dev`, or what a variable names instead.
fn installed(variable: &str, path: &str) -> Option<PathBuf> {
    let usual = || root().join(".dev").join(path);
    Some(env::var_os(variable).map_or_else(usual, PathBuf::from)).filter(|path| path.exists())
}

fn wanted(what: &str, found: Option<PathBuf>) -> Result<Option<PathBuf>> {
    if found.is_none() {
        if env::var_os("CI").is_some() {
            bail!("{what} is missing, and CI must not pass without it: run ./dev setup");
        }
        // Not a print macro: those are captured, and shown for failed tests only.
        writeln!(std::io::stderr(), "NOT TESTED: {what} is missing; ./dev setup says why")?;
    }
    Ok(found)
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .map(|dir| dir.join(program))
        .find(|file| file.exists())
}

/// A binary of this workspace, beside the running one; refused when it is older than its sources.
///
/// `cargo test` builds no binaries of other packages, so a stale one would be tested in silence.
pub fn workspace_binary(name: &str) -> Result<PathBuf> {
    let running = env::current_exe().context("cannot tell where this program is")?;
    let beside = running.parent().unwrap_or(Path::new("/"));
    let profile = if beside.ends_with("deps") { beside.parent().unwrap_or(beside) } else { beside };
    let binary = profile.join(name);
    let built = binary.metadata().and_then(|data| data.modified()).ok();
    let sources: &[&str] = match name {
        "relay" => &["relay/src", "shared/src"],
        "consumer" => &["consumer/src", "shared/src"],
        "poisonable" => &["tests/src/bin/poisonable", "consumer/src", "shared/src"],
        _ => &["tests/src", "shared/src"],
    };
    let changed = sources.iter().filter_map(|source| newest(&root().join(source))).max();
    let reason = match built {
        None => "is missing",
        Some(built) if changed.is_some_and(|changed| changed > built) => "is older than its sources",
        Some(_) => return Ok(binary),
    };
    bail!(
        "{} {reason}; build it first: cargo build -p relay -p consumer --features tests/failpoints -p tests",
        binary.display()
    )
}

fn newest(directory: &Path) -> Option<SystemTime> {
    let entries = std::fs::read_dir(directory).ok()?.flatten();
    entries
        .filter_map(|entry| {
            let path = entry.path();
            if path.is_dir() { newest(&path) } else { entry.metadata().ok()?.modified().ok() }
        })
        .max()
}
