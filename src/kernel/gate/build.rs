//! Compiles the lease gate's programs, if clang is there. Without it the object is empty, and the
//! gate is reported absent.

use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "src/kernel/gate/gate.bpf.c";

fn main() -> Result<(), String> {
    let variable = |name| std::env::var_os(name).ok_or_else(|| format!("{name} is not set"));
    let object = PathBuf::from(variable("OUT_DIR")?).join("gate.o");
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-changed=src/kernel/gate/build.rs");
    if let Err(e) = Command::new("clang").arg("--version").output() {
        // Looked for again once something is installed.
        println!("cargo::rerun-if-changed=/usr/bin");
        println!("cargo::warning=built without the lease gate: clang: {e}");
        return std::fs::write(&object, []).map_err(|e| format!("{}: {e}", object.display()));
    }
    compile(&object)
}

/// With BTF (`-g`), which says which fields of the kernel's types are meant; without what debuggers
/// want beside it, where a tool for that is there.
fn compile(object: &Path) -> Result<(), String> {
    let flags = ["-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Werror", "-c", SOURCE, "-o"];
    // Paths of the build's directory would make objects differ that are the same.
    let status = Command::new("clang")
        .args(["-fdebug-compilation-dir=.", "-ffile-prefix-map=./="])
        .args(flags)
        .arg(object)
        .status()
        .map_err(|e| format!("clang: {e}"))?;
    if !status.success() {
        return Err(format!("clang could not compile {SOURCE} ({status})"));
    }
    let _ = Command::new("llvm-strip").arg("-g").arg(object).status();
    Ok(())
}
