//! `openapi.json` beside what a running agent does: each documented operation is served, with the status,
//! content type and fields that the document names; what it does not name is refused.

use std::collections::BTreeSet;
use std::rc::Rc;

use serde_json::{Value, json};

use crate::agent_process::{Answer, Host, id_of, path_of};
use crate::host::{Place, Test};
use crate::ledger::{losing, with_lost_answer};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "every_documented_operation_answers_as_documented", run: served },
        Test { name: "refusals_are_documented_problems", run: refused },
        Test { name: "what_is_not_documented_is_not_served", run: nothing_else },
    ]
}

const METHODS: [&str; 5] = ["get", "post", "put", "delete", "patch"];

fn document() -> Value {
    serde_json::from_str(include_str!("../openapi.json")).unwrap()
}

/// Method and path of each documented operation.
fn operations(document: &Value) -> BTreeSet<(String, String)> {
    let paths = document["paths"].as_object().unwrap().iter();
    paths
        .flat_map(|(path, item)| {
            let methods = item.as_object().unwrap().keys().filter(|k| METHODS.contains(&&***k));
            methods.map(|method| (method.clone(), path.clone())).collect::<Vec<_>>()
        })
        .collect()
}

/// Why a value is not what a schema describes, if it is not. A field that the schema does not name
/// is such a reason, too.
fn against(document: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    if let Some(name) = schema["$ref"].as_str() {
        let pointer = name.strip_prefix('#').unwrap();
        let of = document.pointer(pointer).ok_or_else(|| format!("{at}: no schema {name}"))?;
        return against(document, of, value, at);
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let tried: Vec<_> = choices.iter().map(|s| against(document, s, value, at)).collect();
        return match tried.iter().any(Result::is_ok) {
            true => Ok(()),
            false => Err(format!("{at}: {value} is none of {tried:?}")),
        };
    }
    // Parts of one object: their fields together are all that it has.
    if let Some(parts) = schema["allOf"].as_array() {
        let mut whole = json!({ "type": "object", "required": [], "properties": {} });
        for part in parts {
            let name = part["$ref"].as_str().map(|name| name.strip_prefix('#').unwrap());
            let part = name.map_or(Some(part), |name| document.pointer(name));
            let part = part.ok_or_else(|| format!("{at}: a part of no schema"))?;
            let required = part["required"].as_array().into_iter().flatten().cloned();
            whole["required"].as_array_mut().unwrap().extend(required);
            let fields = part["properties"].as_object().cloned().unwrap_or_default();
            whole["properties"].as_object_mut().unwrap().extend(fields);
        }
        return against(document, &whole, value, at);
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let allowed = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
        other => return Err(format!("{at}: a schema of type {other}")),
    };
    if !allowed.contains(&kind) {
        return Err(format!("{at}: {value} is no {allowed:?}"));
    }
    if let (Value::Array(items), Some(of)) = (value, schema.get("items")) {
        for (n, item) in items.iter().enumerate() {
            against(document, of, item, &format!("{at}[{n}]"))?;
        }
    }
    if let Value::Object(fields) = value {
        let required = schema["required"].as_array().into_iter().flatten();
        for name in required.filter_map(Value::as_str) {
            if !fields.contains_key(name) {
                return Err(format!("{at}: {name} is missing in {value}"));
            }
        }
        let Some(known) = schema["properties"].as_object() else { return Ok(()) };
        for (name, field) in fields {
            let of =
                known.get(name).or(schema.get("additionalProperties").filter(|s| s.is_object()));
            let of = of.ok_or_else(|| format!("{at}: {name} is not documented"))?;
            against(document, of, field, &format!("{at}.{name}"))?;
        }
    }
    Ok(())
}

/// Why an answer is not one that the operation documents.
fn judge(document: &Value, method: &str, path: &str, answer: &Answer) -> Result<(), String> {
    let responses = &document["paths"][path][method]["responses"];
    let named = &responses[answer.status.to_string()];
    let response = if named.is_null() { &responses["default"] } else { named };
    let kind = answer.kind.split(';').next().unwrap_or_default();
    let described = response["content"].as_object().and_then(|content| content.get(kind));
    let Some(described) = described else {
        return Err(format!("{} as {kind:?} is not in {response}: {}", answer.status, answer.body));
    };
    let at = format!("{method} {path} {}", answer.status);
    match kind {
        "application/json" | "application/problem+json" => {
            let value = serde_json::from_str(&answer.body).map_err(|e| format!("{at}: {e}"))?;
            against(document, &described["schema"], &value, &at)
        }
        "application/x-ndjson" => answer.body.lines().try_for_each(|line| {
            let value = serde_json::from_str(line).map_err(|e| format!("{at}: {e}"))?;
            against(document, &described["schema"], &value, &at)
        }),
        _ => Ok(()),
    }
}

/// An agent, the document, and what was asked so far.
struct Client {
    host: Rc<Host>,
    document: Value,
    asked: BTreeSet<(String, String)>,
}

impl Client {
    fn new(place: &Place) -> Self {
        let mut host = Host::new(place, "h");
        assert!(host.start(Some(&losing(&host))));
        Self { host: Rc::new(host), document: document(), asked: BTreeSet::new() }
    }

    /// Asks an operation for the success that it documents; gives the body.
    fn good(&mut self, method: &str, template: &str, id: &str, query: &str, body: Value) -> Value {
        let path = format!("{}{query}", template.replace("{id}", id));
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.host.http(&method.to_uppercase(), &path, &body);
        let wanted = &self.document["paths"][template][method]["responses"];
        let wanted: Vec<_> =
            wanted.as_object().unwrap().keys().filter(|s| s.starts_with('2')).collect();
        assert_eq!(wanted, [&answer.status.to_string()], "{method} {path}: {answer:?}");
        if let Err(why) = judge(&self.document, method, template, &answer) {
            panic!("{why}");
        }
        self.asked.insert((method.to_owned(), template.to_owned()));
        serde_json::from_str(&answer.body).unwrap_or(Value::Null)
    }
}

fn served(place: &Place) {
    let mut api = Client::new(place);
    let none = Value::Null;
    let made = json!({ "id": "w", "owner": "ann", "labels": { "a": "b" } });
    api.good("post", "/v1/workspaces", "", "", made);
    let opened =
        api.good("post", "/v1/sessions", "", "", json!({ "workspace": "w", "ttl_ms": 60_000 }));
    let id = id_of(&opened);
    let token = opened["token"].clone();
    api.good("post", "/v1/sessions/{id}/beat", &id, "", json!({ "token": token }));
    api.good("post", "/v1/sessions/{id}/exec", &id, "", none.clone());
    std::fs::write(path_of(&opened["session"], "merged").join("f"), "x").unwrap();
    api.good("post", "/v1/sessions/{id}/checkpoint", &id, "", none.clone());
    let request = json!({ "task": "t", "key": "k", "about": "x", "assignee": "ann" });
    api.good("post", "/v1/sessions/{id}/requests", &id, "", request);
    let given = json!({ "key": "k", "assignee": "bob" });
    api.good("post", "/v1/workspaces/{id}/requests/assign", "w", "", given);
    let told = json!({ "key": "k", "outcome": "done", "note": "x" });
    api.good("post", "/v1/workspaces/{id}/requests/ack", "w", "", told.clone());
    api.good("post", "/v1/workspaces/{id}/requests/resolve", "w", "", told);
    api.good("get", "/v1/requests", "", "?all=true", none.clone());
    let rows = api.good("get", "/v1/publications", "", "?workspace=w&all=true", none.clone());
    let key = rows[0]["key"].as_str().unwrap().to_owned();
    api.good("get", "/v1/publications/{id}", &key, "", none.clone());
    api.good("post", "/v1/publications/{id}/resolve", &key, "", none.clone());
    with_lost_answer(&Rc::clone(&api.host), &opened, |key| {
        api.good("post", "/v1/publications/{id}/assign", key, "", json!({ "assignee": "ann" }));
    });
    for (path, of, query) in [
        ("/v1/workspaces", "", ""),
        ("/v1/workspaces/{id}", "w", ""),
        ("/v1/workspaces/{id}/history", "w", "?limit=10"),
        ("/v1/sessions", "", ""),
        ("/v1/sessions/{id}", &id, ""),
        ("/v1/sessions/{id}/diff", &id, ""),
        ("/v1/leases", "", ""),
    ] {
        api.good("get", path, of, query, none.clone());
    }
    // Stopped with a descriptor open, so that holders are shown; then without.
    let held = std::fs::File::create(path_of(&opened["session"], "merged").join("g")).unwrap();
    let wish = json!({ "reason": "test", "wait_ms": 5000 });
    api.good("post", "/v1/workspaces/{id}/fence", "w", "", wish.clone());
    api.host.until(&id, |view| !view["holders"].as_array().unwrap().is_empty());
    api.good("get", "/v1/sessions/{id}", &id, "", none.clone());
    drop(held);
    api.good("post", "/v1/sessions/{id}/fence", &id, "", wish.clone());
    api.host.until(&id, |view| view["state"] == "PRESERVED");
    api.good("get", "/v1/preserved", "", "", none.clone());
    api.good("post", "/v1/sessions/{id}/keep", &id, "", json!({ "for_ms": 1000 }));
    let made = api.good("post", "/v1/sessions/{id}/export", &id, "", none.clone());
    api.good("post", "/v1/gc", "", "?dry_run=true", none.clone());
    let who = json!({ "authorised_by": "ann", "reason": "test" });
    api.good("post", "/v1/sessions/{id}/readmit", &id, "", who);
    let lease = api.good("get", "/v1/leases", "", "", none.clone())[0]["id"].clone();
    api.good("post", "/v1/leases/{id}/revoke", lease.as_str().unwrap(), "", wish);
    api.host.until(&id, |view| view["state"] == "PRESERVED");
    api.good("post", "/v1/sessions/{id}/discard", &id, "", none.clone());
    let apply = json!({
        "bundle": made["path"], "authorised_by": "ann", "reason": "test", "open": { "workspace": "w" },
    });
    let back = id_of(&api.good("post", "/v1/bundles/apply", "", "", apply));
    api.good("post", "/v1/sessions/{id}/close", &back, "", json!({ "mode": "discard" }));
    let other = id_of(&api.good("post", "/v1/sessions", "", "", json!({ "workspace": "w" })));
    api.good("post", "/v1/sessions/{id}/close", &other, "", json!({ "mode": "discard" }));
    api.good("post", "/v1/workspaces", "", "", json!({ "id": "x" }));
    api.good("post", "/v1/workspaces/{id}/verify", "w", "", none.clone());
    api.good("post", "/v1/workspaces/{id}/revert", "w", "", json!({ "to": 0 }));
    std::fs::create_dir(api.host.dir.join("tree")).unwrap();
    let tree = api.host.dir.join("tree").display().to_string();
    let import = json!({ "about": { "id": "y", "lowers": [tree] } });
    api.good("post", "/v1/import", "", "", import);
    let why = json!({ "reason": "test" });
    api.good("post", "/v1/workspaces/{id}/hold", "x", "", why);
    let why = json!({ "reason": "test", "accept_generation": 3 });
    api.good("post", "/v1/workspaces/{id}/repair", "x", "", why);
    api.good("post", "/v1/workspaces/{id}/delete", "x", "", none.clone());
    for path in [
        "/v1/evidence",
        "/v1/evidence/verify",
        "/v1/events",
        "/v1/status",
        "/v1/breaker",
        "/v1/ticket-key",
        "/metrics",
        "/healthz",
    ] {
        api.good("get", path, "", "", none.clone());
    }
    api.good("post", "/v1/breaker/reset", "", "", json!({ "reason": "test" }));
    let dest = api.host.dir.join("backup").display().to_string();
    api.good("post", "/v1/backup", "", "", json!({ "dest": dest }));
    api.good("post", "/v1/drain", "", "", json!({}));
    assert_eq!(api.asked, operations(&api.document), "not all that is documented was asked for");
}

/// A problem with a code of the table, and the status that the code has there.
fn is_a_problem(document: &Value, method: &str, template: &str, answer: &Answer) -> String {
    if let Err(why) = judge(document, method, template, answer) {
        panic!("{why}");
    }
    assert_eq!(answer.kind, "application/problem+json", "{answer:?}");
    let problem: Value = serde_json::from_str(&answer.body).unwrap();
    let code = problem["code"].as_str().unwrap().to_owned();
    let known = overfence::model::code::Code::ALL.iter().find(|c| c.as_str() == code).unwrap();
    assert_eq!(
        (known.status(), problem["status"].as_u64()),
        (answer.status, Some(answer.status.into()))
    );
    code
}

fn refused(place: &Place) {
    let api = Client::new(place);
    for (method, template) in operations(&api.document) {
        let ask = |path: &str, body: &str| {
            let answer = api.host.http(&method.to_uppercase(), path, body);
            is_a_problem(&api.document, &method, &template, &answer)
        };
        let code = ask(&format!("{}?no-such-key=1", template.replace("{id}", "x")), "");
        assert_eq!(code, "bad_request", "{method} {template}");
        let body = &api.document["paths"][&*template][&*method]["requestBody"];
        if !body.is_null() {
            let path = template.replace("{id}", "x");
            assert_eq!(ask(&path, "{\"no-such-field\":1}"), "bad_request", "{method} {template}");
            assert_eq!(ask(&path, "{"), "bad_request", "{method} {template}");
        }
        if template.contains("{id}") {
            let of = &api.document["paths"][&*template][&*method]["requestBody"]["content"];
            let name = of["application/json"]["schema"]["$ref"].as_str().unwrap_or_default();
            let body = match name.rsplit('/').next().unwrap() {
                "Beat" => json!({ "token": "x" }),
                "KeepSession" => json!({ "for_ms": 1 }),
                "BeginRequest" => json!({ "task": "t", "key": "k" }),
                "SettleRequest" => json!({ "key": "k", "outcome": "done", "note": "x" }),
                "AssignRequest" => json!({ "key": "k", "assignee": "x" }),
                "AssignPublication" => json!({ "assignee": "x" }),
                "ReadmitSession" => json!({ "authorised_by": "x", "reason": "x" }),
                "HoldWorkspace" | "RepairWorkspace" => json!({ "reason": "x" }),
                _ => json!({}),
            };
            let code = ask(&template.replace("{id}", "0123"), &body.to_string());
            let wanted = ["unknown_session", "unknown_workspace", "unknown_lease", "not_found"];
            assert!(wanted.contains(&&*code), "{method} {template}: {code}");
        }
    }
}

fn nothing_else(place: &Place) {
    let api = Client::new(place);
    let known = operations(&api.document);
    let templates: BTreeSet<_> = known.iter().map(|(_, path)| path).collect();
    for template in &templates {
        for method in METHODS {
            if known.contains(&(method.to_owned(), (*template).clone())) {
                continue;
            }
            let path = template.replace("{id}", "x");
            let answer = api.host.http(&method.to_uppercase(), &path, "");
            let problem: Value = serde_json::from_str(&answer.body).unwrap();
            assert_eq!(problem["code"], "bad_request", "{method} {path}: {answer:?}");
        }
        // Nor is there anything below or above it.
        for path in [format!("{template}/x").replace("{id}", "y/z"), template.replace("/v1", "/v2")]
        {
            if path != **template && !path.starts_with("/healthz") && !path.starts_with("/metrics")
            {
                let answer = api.host.http("GET", &path, "");
                assert_eq!(answer.status, 404, "{path}: {answer:?}");
            }
        }
    }
}
