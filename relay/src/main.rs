//! The `relay` binary: each command is a composition of its own.

use std::{
    io::{self, ErrorKind},
    process::ExitCode,
};

use shared::process;

mod commands;

use commands::{Cli, CommandError};

#[tokio::main]
async fn main() -> ExitCode {
    let cli: Cli = match process::arguments() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match cli.run(&mut io::stdout()).await {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads the output has seen enough.
        Err(CommandError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => process::fail(&error),
    }
}
