//! `overfence`: verbs to rooms, nothing else.

fn main() {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|verb| verb == "session-init") {
        overfence::workload::init_main(args);
    }
}
