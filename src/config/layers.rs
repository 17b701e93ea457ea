//! One configuration out of files and environment, remembering who set what.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::{Config, Error, PATH, keys};

/// A configuration and who set what.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The effective configuration.
    pub config: Config,
    /// Dotted key to the file or variable that set it; keys at their default are absent.
    pub origins: BTreeMap<String, String>,
    /// Variables named as ours that set nothing. Whoever starts an agent is told; a client in an
    /// environment of its own is not kept from asking.
    pub strangers: Vec<String>,
}

impl Loaded {
    /// As [`Config::load`], with a given environment.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn read(
        path: Option<&Path>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, Error> {
        let mut all = Layers::default();
        let main = path.unwrap_or(Path::new(PATH));
        match std::fs::read_to_string(main) {
            Ok(text) => all.file(main, &text)?,
            Err(fault) if path.is_none() && fault.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(Error::Read { path: main.into(), source }),
        }
        for drop_in in drop_ins(main)? {
            let text = std::fs::read_to_string(&drop_in)
                .map_err(|source| Error::Read { path: drop_in.clone(), source })?;
            all.file(&drop_in, &text)?;
        }
        for (variable, value) in environment {
            all.variable(&variable.to_string_lossy(), &value)?;
        }
        all.finish()
    }
}

fn drop_ins(main: &Path) -> Result<Vec<PathBuf>, Error> {
    let dir = main.parent().unwrap_or(Path::new("/")).join("conf.d");
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(fault) if fault.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(Error::Read { path: dir, source }),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|source| Error::Read { path: dir.clone(), source })?.path();
        if path.extension().is_some_and(|ending| ending == "toml") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// What was said so far; later words replace earlier ones.
#[derive(Default)]
struct Layers {
    said: Table,
    origins: BTreeMap<String, String>,
    strangers: Vec<String>,
}

impl Layers {
    fn file(&mut self, path: &Path, text: &str) -> Result<(), Error> {
        // Read as a whole configuration first: only this knows the line of an unknown key.
        let parsed = toml::from_str::<Config>(text).and_then(|_| toml::from_str::<Table>(text));
        let table = parsed.map_err(|fault| {
            let at = fault.span().map_or(0, |span| span.start).min(text.len());
            let line = text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
            Error::File { path: path.into(), line, message: fault.message().replace('\n', ", ") }
        })?;
        for (name, value) in table {
            match value {
                Value::Table(section) => {
                    for (key, value) in section {
                        self.set(&format!("{name}.{key}"), value, &path.display().to_string());
                    }
                }
                value => self.set(&name, value, &path.display().to_string()),
            }
        }
        Ok(())
    }

    fn variable(&mut self, variable: &str, value: &std::ffi::OsStr) -> Result<(), Error> {
        let Some(key) = keys::of_variable(variable) else {
            if keys::is_strange(variable) {
                self.strangers.push(variable.into());
            }
            return Ok(());
        };
        let fault = |message: String| Error::Environment { variable: variable.into(), message };
        let text = value.to_str().ok_or_else(|| fault("it is not UTF-8".into()))?;
        let number = text.parse::<i64>().ok().filter(|_| keys::is_number(key));
        let value = number.map_or_else(|| Value::String(text.into()), Value::Integer);
        let mut alone = Self::default();
        alone.set(key, value.clone(), variable);
        alone.said.try_into::<Config>().map_err(|e| fault(e.message().replace('\n', ", ")))?;
        self.set(key, value, variable);
        Ok(())
    }

    fn set(&mut self, key: &str, value: Value, origin: &str) {
        self.origins.insert(key.into(), origin.into());
        let place = match key.split_once('.') {
            None => self.said.entry(key),
            Some((section, key)) => {
                let section = self.said.entry(section).or_insert_with(|| Table::new().into());
                match section {
                    Value::Table(table) => table.entry(key),
                    _ => return,
                }
            }
        };
        match place {
            toml::map::Entry::Occupied(mut old) => drop(old.insert(value)),
            toml::map::Entry::Vacant(free) => drop(free.insert(value)),
        }
    }

    fn finish(self) -> Result<Loaded, Error> {
        let Self { said, origins, mut strangers } = self;
        strangers.sort();
        let mut config: Config = said.try_into().map_err(|fault: toml::de::Error| {
            Error::Environment { variable: "OVERFENCE_*".into(), message: fault.message().into() }
        })?;
        let below = |key: &str, place: &mut PathBuf, path: PathBuf| {
            if !origins.contains_key(key) {
                *place = path;
            }
        };
        below("socket", &mut config.socket, config.runtime_dir.join("overfence.sock"));
        for (key, place, name) in [
            ("high_water_file", &mut config.high_water_file, "high-water"),
            ("evidence_anchor_file", &mut config.evidence_anchor_file, "evidence-anchors"),
            ("keys_dir", &mut config.keys_dir, "keys"),
            ("bundles_dir", &mut config.bundles_dir, "bundles"),
        ] {
            below(key, place, config.state_dir.join(name));
        }
        config.check().map_err(|(key, message)| {
            let origin = origins.get(key).map_or("default", String::as_str).to_owned();
            Error::Value { key, origin, message }
        })?;
        Ok(Loaded { config, origins, strangers })
    }
}
