use clap::CommandFactory as _;

use super::*;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

#[test]
fn the_definition_holds_together() {
    Cli::command().debug_assert();
}

#[test]
fn the_contract_is_taken() {
    for line in [
        "overfence run -w team/repo --create --lower /a --lower /b --user root --ttl 30s -- sh -c x",
        "overfence run --workspace w --holder beat --on-exit discard --network host --force",
        "overfence run -w w --on-exit checkpoint --on-busy kill --max-lifetime 2h -q -- make -j2",
        "overfence workspace create w --lower /a --owner me --contact x --label team=a",
        "overfence workspace list --selector team=a --selector x=y -o json",
        "overfence workspace status w",
        "overfence workspace history w --limit 3",
        "overfence session open -w w --user 1000 --ttl 1m --holder process --network own",
        "overfence session list",
        "overfence session inspect s-1",
        "overfence session exec s-1 -- ls -l",
        "overfence session exec s-1",
        "overfence session checkpoint s-1",
        "overfence session close s-1",
        "overfence session close s-1 --discard --yes",
        "overfence fence s-1 --to read-only --on-busy hold --reason because --wait",
        "overfence fence -w w --to killed --wait=2s",
        "overfence readmit s-1 --authorised-by me --reason checked",
        "overfence lease list",
        "overfence lease revoke l-1 --reason gone --wait",
        "overfence lease beat",
        "overfence lease beat s-1 --token t",
        "overfence lease beat s-1 --token-file -",
        "overfence ticket verify - --key k",
        "overfence preserved list",
        "overfence preserved export s-1 --dest d --dispose --yes",
        "overfence preserved discard s-1",
        "overfence preserved keep s-1 --until 48h",
        "overfence bundle inspect d",
        "overfence bundle verify d",
        "overfence publication list",
        "overfence publication list -w w --all",
        "overfence publication show p-1",
        "overfence publication resolve p-1",
        "overfence publication assign p-1 ann",
        "overfence request begin --task t --key k",
        "overfence request begin s-1 --task t --key k --about x --assignee ann --generation 3",
        "overfence request ack k done",
        "overfence request ack k not-done -w w --note x",
        "overfence request resolve k done -w w --reason x",
        "overfence request assign k ann -w w",
        "overfence request list",
        "overfence request list -w w --all",
        "overfence gc --dry-run",
        "overfence evidence show --since 4 --limit 2 --session s-1",
        "overfence evidence show --last 20",
        "overfence evidence verify",
        "overfence status --socket /s --timeout 3s --output json --quiet",
        "overfence events --follow --since 7",
        "overfence doctor",
        "overfence config default",
        "overfence config check --config /c",
        "overfence config show",
        "overfence completions bash",
        "overfence man session open",
    ] {
        assert!(parse(line).is_ok(), "{line}: {}", parse(line).unwrap_err());
    }
}

#[test]
fn what_makes_no_sense_is_a_usage_error() {
    for line in [
        "overfence",
        "overfence run -- ls",
        "overfence run -w w --lower /a -- ls",
        "overfence run -w w --ttl 30",
        "overfence run -w w --user no-such-user-here",
        "overfence run -w w --on-exit burn",
        "overfence session open",
        "overfence session close s-1 --keep --discard",
        "overfence fence",
        "overfence fence s-1 -w w",
        "overfence fence s-1 --to gated",
        "overfence fence s-1 --on-busy wait",
        "overfence readmit s-1 --reason x",
        "overfence request begin --task t",
        "overfence request begin --key k",
        "overfence request ack k",
        "overfence request ack k perhaps",
        "overfence request resolve k done -w w",
        "overfence request assign k ann",
        "overfence publication resolve",
        "overfence readmit s-1 --authorised-by me",
        "overfence lease beat s-1",
        "overfence lease beat --token t",
        "overfence lease beat s-1 --token t --token-file f",
        "overfence preserved keep s-1",
        "overfence evidence show --last 3 --limit 3",
        "overfence session inspect ",
        "overfence preserved keep s-1 --until yesterday",
        "overfence workspace list --selector team",
        "overfence status --timeout 3",
        "overfence status -o yaml",
    ] {
        let fault = parse(line).expect_err(line);
        assert_eq!(fault.exit_code(), 2, "{line}");
    }
}

#[test]
fn a_command_keeps_its_own_flags() {
    let cli = parse("overfence run -w w -q -- cmd -o json --quiet -w other").unwrap();
    assert_eq!(cli.common.output, Output::Table);
    assert!(matches!(cli.verb, Verb::Run(_)));
    assert!(
        format!("{:?}", cli.verb).contains(r#"["cmd", "-o", "json", "--quiet", "-w", "other"]"#)
    );
}

#[test]
fn what_is_internal_is_not_offered() {
    let words = |line: &str| line.split_whitespace().map(OsString::from).collect::<Vec<_>>();
    let help = Cli::command().render_long_help().to_string();
    assert!(!help.contains(INIT), "{help}");
    let mut script = Vec::new();
    clap_complete::generate(
        clap_complete::Shell::Bash,
        &mut Cli::command(),
        "overfence",
        &mut script,
    );
    assert!(!String::from_utf8(script).unwrap().contains(INIT));
    for line in ["overfence sesion", "overfence session-ini", "overfence session-init-x"] {
        let fault = parsed(&words(line)).unwrap_err().to_string();
        assert!(!fault.contains("'session-init'"), "{fault}");
    }
    let cli = parsed(&words("overfence session-init 3 --4")).unwrap();
    assert!(matches!(cli.verb, Verb::SessionInit { fds } if fds == ["3", "--4"]));
}

#[test]
fn a_wrong_command_line_is_not_the_commands_own_2() {
    for (line, code) in [
        ("overfence run -w w --ttl 30 -- true", 125),
        ("overfence -o json --timeout 3s run --wrkspace w", 125),
        ("overfence run", 125),
        ("overfence run -w", 125),
        ("overfence --timeout soon run -w w", 125),
        ("overfence session exec", 125),
        ("overfence session exec s-1 ls", 125),
        ("overfence session open -w w -- run", 2),
        ("overfence session close run exec", 2),
        ("overfence fence", 2),
        ("overfence status run", 2),
        ("overfence", 2),
        ("overfence rn -w w", 2),
        ("overfence run --help", 0),
        ("overfence --version", 0),
    ] {
        let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let fault = parsed(&args).expect_err(line);
        assert_eq!(usage_code(&args, &fault), code, "{line}: {fault}");
    }
}

#[test]
fn the_committed_reference_is_this_one() {
    crate::golden::check("docs/CLI.md", &reference::reference());
}
