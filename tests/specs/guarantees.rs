//! The page of guarantees names tests that exist: a promise without a test is not made.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result, ensure};

/// Every `module::…::function` of a file below `specs` that is a test.
fn tests_below(directory: &Path, module: &str, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).context("a name in UTF-8")?;
        let inner = if module.is_empty() { stem.to_owned() } else { format!("{module}::{stem}") };
        if path.is_dir() {
            tests_below(&path, &inner, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let mut is_test = false;
            for line in fs::read_to_string(&path)?.lines().map(str::trim) {
                is_test |= line.starts_with("#[tokio::test") || line.starts_with("#[test]");
                let name =
                    line.split_once("fn ").and_then(|(_, rest)| rest.split_once('(')).map(|(name, _)| name);
                if let (true, Some(name)) = (is_test, name) {
                    found.insert(format!("{inner}::{name}"));
                    is_test = false;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_guarantee_names_tests_that_exist() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut known = BTreeSet::new();
    tests_below(&root.join("specs"), "", &mut known)?;
    let page = fs::read_to_string(root.join("../docs/GUARANTEES.md"))?;
    let (promises, _) = page.split_once("## What is not guaranteed").context("the last section")?;
    for item in promises.split("\n- ").skip(1) {
        let named: Vec<&str> =
            item.split('`').skip(1).step_by(2).filter(|name| name.contains("::")).collect();
        ensure!(!named.is_empty(), "no test is named for: {item}");
        for name in named {
            ensure!(known.contains(name), "there is no test {name}");
        }
    }
    Ok(())
}
