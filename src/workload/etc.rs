//! The `/etc` that a workload sees: chosen files of the host's, copied, without secrets. Made once
//! and kept; its name has the digest of the sources' times and sizes, so that a changed host gets
//! a new one.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::{Result, io_at};

/// Files and directories that are copied as they are, below `/etc`.
const CHOSEN: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "environment",
    "ethertypes",
    "fonts",
    "gai.conf",
    "host.conf",
    "hosts",
    "inputrc",
    "issue",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "mime.types",
    "networks",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki/tls/certs",
    "profile",
    "profile.d",
    "protocols",
    "python3",
    "python3.11",
    "python3.13",
    "resolv.conf",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "xattr.conf",
];

/// Copied with the second field of each line, where old systems keep a password, made an `x`.
const ACCOUNTS: &[&str] = &["passwd", "group"];

/// The directory to bind at `/etc`, made if it is not there yet.
pub(super) fn prepare(state_dir: &Path) -> Result<PathBuf> {
    prepare_from(Path::new("/etc"), state_dir)
}

fn prepare_from(host: &Path, state_dir: &Path) -> Result<PathBuf> {
    let ready = state_dir.join(format!("etc-{}", digest(host)));
    if ready.is_dir() {
        return Ok(ready);
    }
    let making = state_dir.join(format!("etc-making-{}", std::process::id()));
    let _ = fs::remove_dir_all(&making);
    fs::create_dir_all(&making).map_err(io_at("make the directory", &making))?;
    let made = fill(host, &making);
    let may = crate::failpoint::fails("workload.etc.before").map_err(io_at("make", &making));
    let made = made.and(may);
    let made = made.and_then(|()| match fs::rename(&making, &ready) {
        // Somebody else was faster; theirs has the same content.
        Err(_) if ready.is_dir() => Ok(()),
        other => other.map_err(io_at("rename the prepared /etc to", &ready)),
    });
    crate::failpoint::hit("workload.etc.after");
    let _ = fs::remove_dir_all(&making);
    made.map(|()| ready)
}

fn digest(host: &Path) -> String {
    let mut sum = Sha256::new();
    for name in CHOSEN.iter().chain(ACCOUNTS) {
        sum.update(name.as_bytes());
        if let Ok(meta) = fs::metadata(host.join(name)) {
            for part in
                [meta.size(), meta.mtime().cast_unsigned(), meta.mtime_nsec().cast_unsigned()]
            {
                sum.update(part.to_le_bytes());
            }
        }
        sum.update([0]);
    }
    hex::encode(&sum.finalize()[..8])
}

fn fill(host: &Path, to: &Path) -> Result<()> {
    directory(to)?;
    for name in CHOSEN {
        let (from, to) = (host.join(name), to.join(name));
        // Links at the top (resolv.conf, localtime, os-release) may point out of what is bound.
        let Ok(meta) = fs::metadata(&from) else { continue };
        if let Some(parent) = to.parent() {
            directory(parent)?;
        }
        copy(&from, &to, &meta)?;
    }
    for name in ACCOUNTS {
        if let Ok(text) = fs::read_to_string(host.join(name)) {
            write(&to.join(name), without_passwords(&text).as_bytes(), 0o644)?;
        }
    }
    link(Path::new("/proc/mounts"), &to.join("mtab"))
}

fn directory(at: &Path) -> Result<()> {
    fs::create_dir_all(at).map_err(io_at("make the directory", at))?;
    // Whatever the caller's umask is.
    fs::set_permissions(at, fs::Permissions::from_mode(0o755)).map_err(io_at("open up", at))
}

fn copy(from: &Path, to: &Path, meta: &fs::Metadata) -> Result<()> {
    if meta.is_dir() {
        directory(to)?;
        for entry in fs::read_dir(from).map_err(io_at("list", from))? {
            let entry = entry.map_err(io_at("list", from))?;
            let inner = entry.metadata().map_err(io_at("look at", entry.path()))?;
            copy(&entry.path(), &to.join(entry.file_name()), &inner)?;
        }
        Ok(())
    } else if meta.is_symlink() {
        link(&fs::read_link(from).map_err(io_at("read the link", from))?, to)
    } else if meta.is_file() && meta.mode() & 0o004 != 0 {
        // What not everybody may read is a secret.
        let bytes = fs::read(from).map_err(io_at("read", from))?;
        write(to, &bytes, meta.mode() & 0o555 | 0o444)
    } else {
        Ok(())
    }
}

fn link(target: &Path, at: &Path) -> Result<()> {
    std::os::unix::fs::symlink(target, at).map_err(io_at("make the link", at))
}

fn write(to: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let mut file = fs::File::create_new(to).map_err(io_at("make", to))?;
    file.write_all(bytes).map_err(io_at("write", to))?;
    file.set_permissions(fs::Permissions::from_mode(mode)).map_err(io_at("set the mode of", to))
}

fn without_passwords(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let mut fields: Vec<&str> = line.split(':').collect();
        if let Some(password) = fields.get_mut(1) {
            *password = "x";
        }
        out.push_str(&fields.join(":"));
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_files_lose_their_passwords_and_nothing_else() {
        assert_eq!(
            without_passwords("root:$6$abc:0:0:root:/root:/bin/sh\nplain\n"),
            "root:x:0:0:root:/root:/bin/sh\nplain\n"
        );
    }

    #[test]
    fn secrets_stay_out_and_a_changed_host_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (host, state) = (dir.path().join("etc"), dir.path().join("state"));
        fs::create_dir_all(host.join("ssl/certs")).unwrap();
        fs::create_dir_all(host.join("ssl/private")).unwrap();
        fs::create_dir_all(host.join("profile.d")).unwrap();
        fs::write(host.join("passwd"), "a:hash:1:1::/:/bin/sh\n").unwrap();
        fs::write(host.join("shadow"), "a:hash:::\n").unwrap();
        fs::write(host.join("ssl/private/key"), "k").unwrap();
        fs::write(host.join("ssl/certs/c"), "c").unwrap();
        fs::write(host.join("profile.d/open"), "o").unwrap();
        fs::write(host.join("profile.d/shut"), "s").unwrap();
        fs::set_permissions(host.join("profile.d/shut"), fs::Permissions::from_mode(0o640))
            .unwrap();

        let first = prepare_from(&host, &state).unwrap();
        assert_eq!(fs::read_to_string(first.join("passwd")).unwrap(), "a:x:1:1::/:/bin/sh\n");
        assert!(first.join("ssl/certs/c").exists() && first.join("profile.d/open").exists());
        for secret in ["shadow", "ssl/private", "profile.d/shut"] {
            assert!(!first.join(secret).exists(), "{secret} was copied");
        }
        assert_eq!(prepare_from(&host, &state).unwrap(), first);

        fs::write(host.join("hosts"), "127.0.0.1 localhost\n").unwrap();
        let second = prepare_from(&host, &state).unwrap();
        assert_ne!(second, first);
        assert!(second.join("hosts").exists());
        let left = fs::read_dir(&state).unwrap().count();
        assert_eq!(left, 2, "a half-made directory was left");
    }
}
