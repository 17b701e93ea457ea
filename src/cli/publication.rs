//! `overfence publication`

use clap::{Args, Subcommand};

use super::context::Context;
use super::{parse, table};
use crate::agent::failure::Failure;
use crate::api::client::path;
use crate::model::view::{AssignPublication, PublicationView};

/// What can be done with publications.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List those whose outcome is still to come, with who sees to each.
    List(Listed),
    /// Show one.
    Show {
        /// Its key, or a unique prefix.
        #[arg(value_parser = parse::name)]
        key: String,
    },
    /// Find what became of one at the authority; if it was not committed, it never will be.
    Resolve {
        /// Its key, or a unique prefix.
        #[arg(value_parser = parse::name)]
        key: String,
    },
    /// Give an open one to somebody.
    Assign {
        /// Its key, or a unique prefix.
        #[arg(value_parser = parse::name)]
        key: String,
        /// To whom.
        #[arg(value_parser = parse::name)]
        assignee: String,
    },
}

/// Which rows are listed.
#[derive(Debug, Args)]
pub struct Listed {
    /// Of this workspace alone.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    pub(super) workspace: Option<String>,
    /// Also those whose outcome is known.
    #[arg(long)]
    pub(super) all: bool,
}

impl Listed {
    /// The path of the list, with its query.
    pub(super) fn path(&self, what: &str) -> String {
        let mut place = format!("{}?all={}", path(&[what]), self.all);
        if let Some(workspace) = &self.workspace {
            // Percent-encoded as a segment of a path is.
            let encoded = path(&[workspace]);
            place.push_str(&format!("&workspace={}", encoded.trim_start_matches("/v1/")));
        }
        place
    }
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    let client = context.client()?;
    match verb {
        Verb::List(listed) => {
            let all: Vec<PublicationView> = client.get(&listed.path("publications"))?;
            let what = if listed.all { "publications" } else { "publications without an outcome" };
            context.list(&all, what, list)
        }
        Verb::Show { key } => {
            let view: PublicationView = client.get(&path(&["publications", &key]))?;
            context.show(&view, one)
        }
        Verb::Resolve { key } => {
            let place = path(&["publications", &key, "resolve"]);
            let view: PublicationView = client.post(&place, &serde_json::json!({}))?;
            context.show(&view, one)
        }
        Verb::Assign { key, assignee } => {
            let place = path(&["publications", &key, "assign"]);
            let view: PublicationView = client.post(&place, &AssignPublication { assignee })?;
            context.show(&view, one)
        }
    }
}

fn list(all: &[PublicationView]) -> String {
    table::rows(
        ["KEY", "WORKSPACE", "STATE", "GENERATION", "VERSION", "ASSIGNEE", "ENTERED", "WHY"],
        all.iter().map(|row| {
            [
                row.key.clone(),
                row.workspace.clone(),
                row.state.clone(),
                table::or_dash(row.generation.map(|g| g.to_string())),
                table::or_dash(row.version.map(|v| v.to_string())),
                table::or_dash(row.assignee.clone()),
                table::or_dash(Some(table::ago(&row.entered_at))),
                table::or_dash(row.why.clone()),
            ]
        }),
    )
}

fn one(row: &PublicationView) -> String {
    table::facts([
        ("publication", Some(row.key.clone())),
        ("workspace", Some(row.workspace.clone())),
        ("state", Some(row.state.clone())),
        ("why", row.why.clone()),
        ("version", row.version.map(|version| version.to_string())),
        ("layer", row.layer.map(|layer| layer.to_string())),
        ("session", row.session.clone()),
        ("generation", row.generation.map(|generation| generation.to_string())),
        ("owner", row.owner.clone()),
        ("assignee", row.assignee.clone()),
        ("entered", Some(table::second(&row.entered_at))),
        ("changed", Some(table::second(&row.changed_at))),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_with_a_slash_is_one_value_of_the_query() {
        let listed = Listed { workspace: Some("team/re po&x".into()), all: true };
        let place = listed.path("requests");
        assert_eq!(place, "/v1/requests?all=true&workspace=team%2Fre%20po%26x");
        let all = Listed { workspace: None, all: false };
        assert_eq!(all.path("publications"), "/v1/publications?all=false");
    }
}
