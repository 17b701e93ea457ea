//! Files that are made from the program and committed; tests compare them.

/// Compares `text` with the file at `path` below the crate's root; with `UPDATE_GOLDEN=1` in the
/// environment it is written instead.
pub(crate) fn check(path: &str, text: &str) {
    let full = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        if let Some(dir) = full.parent() {
            std::fs::create_dir_all(dir).unwrap();
        }
        std::fs::write(&full, text).unwrap();
    }
    let committed = std::fs::read_to_string(&full).unwrap_or_default();
    assert!(committed == text, "{path} is out of date: run the tests with UPDATE_GOLDEN=1");
}
