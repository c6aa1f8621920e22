//! The JSON of the commands that read is the document of the API: with a context, with `--direct` and over HTTP. It is
//! valid under the schemas of `/openapi.json`.

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value, json};
use shepherd::cli::object::kind::{KINDS, ObjectKind};
use shepherd::model::access::AccessRole;

use crate::api::command_line::Operator;
use crate::api::same_answers::{READS, populate};
use crate::api::{Api, Key};
use crate::harness::aloud::TestResult;

/// How often the three ways are read. Figures that a moment changes are the same in one of these.
const MAX_READS: u32 = 60;
/// Most objects of a kind that are described one by one.
const MAX_DESCRIBED: usize = 3;

/// What a command prints of the response to its call.
#[derive(Clone, Copy)]
enum DocumentForm {
    /// The response as it is.
    Response,
    /// The whole response, with this list of all pages.
    List(&'static str),
    /// The only object of this list.
    Object(&'static str),
}
use DocumentForm::{List, Object, Response};

/// A command that reads: its line, in which `M` is a machine; its call and the request; what it prints of the response;
/// and the message that this is.
type ReadingCommand = (&'static str, &'static str, &'static str, DocumentForm, &'static str);

const DOCUMENTS: &[ReadingCommand] = &[
    ("get machines", "Machines/List", r#"{"omitRetired": true}"#, List("machines"), "ListMachinesResponse"),
    ("get machines M", "Machines/List", r#"{"names": ["M"]}"#, Object("machines"), "Machine"),
    ("get sessions", "Sessions/List", "{}", List("sessions"), "ListSessionsResponse"),
    ("get work", "Work/List", "{}", List("work"), "ListWorkResponse"),
    ("get providers", "Providers/List", "{}", List("providers"), "ListProvidersResponse"),
    ("get loops", "Loops/List", "{}", List("loops"), "ListLoopsResponse"),
    ("get approvals", "Approvals/List", "{}", List("approvals"), "ListApprovalsResponse"),
    ("get budgets", "Budgets/List", "{}", List("budgets"), "ListBudgetsResponse"),
    ("get brakes", "Budgets/List", "{}", List("brakes"), "ListBudgetsResponse"),
    ("get shepherds", "Shepherds/List", "{}", List("shepherds"), "ListShepherdsResponse"),
    ("get clusters", "Clusters/List", "{}", List("clusters"), "ListClustersResponse"),
    ("get clusters ams", "Clusters/List", r#"{"name": "ams"}"#, Object("clusters"), "Cluster"),
    ("get issues", "Issues/List", "{}", List("issues"), "ListIssuesResponse"),
    ("get tokens", "Credentials/List", "{}", List("credentials"), "ListCredentialsResponse"),
    ("get artefacts", "Artefacts/List", "{}", List("artefacts"), "ListArtefactsResponse"),
    ("get updates", "Updates/List", "{}", List("updates"), "ListUpdatesResponse"),
    ("get updates u1", "Updates/List", r#"{"id": "u1"}"#, Object("updates"), "Update"),
    ("get policy", "Policy/Get", "{}", Response, "GetPolicyResponse"),
    ("get audit", "Audit/List", "{}", List("records"), "ListAuditResponse"),
    ("audit", "Audit/List", "{}", List("records"), "ListAuditResponse"),
    ("issues", "Issues/List", "{}", List("issues"), "ListIssuesResponse"),
    ("describe machine M", "Machines/Describe", r#"{"machine": "M"}"#, Response, "DescribeMachineResponse"),
    ("describe cluster ams", "Clusters/List", r#"{"name": "ams"}"#, Object("clusters"), "Cluster"),
    ("describe update u1", "Updates/List", r#"{"id": "u1"}"#, Object("updates"), "Update"),
    ("describe policy", "Policy/Get", "{}", Response, "GetPolicyResponse"),
    ("cluster get", "Clusters/List", "{}", List("clusters"), "ListClustersResponse"),
    ("cluster describe ams", "Clusters/List", r#"{"name": "ams"}"#, Object("clusters"), "Cluster"),
    ("cluster plan ams", "Clusters/Plan", r#"{"name": "ams"}"#, Response, "PlanClusterResponse"),
    (
        "cluster plan ams --delete",
        "Clusters/Plan",
        r#"{"name": "ams", "delete": true}"#,
        Response,
        "PlanClusterResponse",
    ),
    (
        "cluster snapshots ams",
        "Clusters/ListSnapshots",
        r#"{"name": "ams"}"#,
        List("snapshots"),
        "ListSnapshotsResponse",
    ),
    (
        "cluster credentials get ams",
        "ClusterCredentials/List",
        r#"{"name": "ams"}"#,
        List("credentials"),
        "ListClusterCredentialsResponse",
    ),
    ("why M", "Machines/Why", r#"{"machine": "M"}"#, Response, "WhyResponse"),
    (
        "timeline M --limit 2000",
        "Machines/Timeline",
        r#"{"machine": "M", "withoutRoutine": true}"#,
        List("events"),
        "TimelineResponse",
    ),
    ("plan", "Plan/Get", r#"{"horizon": "1h", "withoutRoutine": true}"#, List("rows"), "GetPlanResponse"),
];

/// The kinds without a page of their own: the list of each in a response, and the message of its objects.
const GENERIC_PAGES: &[(ObjectKind, &str, &str, &str)] = &[
    (ObjectKind::Shepherd, "Shepherds/List", "shepherds", "Shepherd"),
    (ObjectKind::Session, "Sessions/List", "sessions", "Session"),
    (ObjectKind::Work, "Work/List", "work", "WorkItem"),
    (ObjectKind::Provider, "Providers/List", "providers", "Provider"),
    (ObjectKind::Loop, "Loops/List", "loops", "Loop"),
    (ObjectKind::Budget, "Budgets/List", "budgets", "Budget"),
    (ObjectKind::Brake, "Budgets/List", "brakes", "BrakeState"),
    (ObjectKind::Approval, "Approvals/List", "approvals", "Approval"),
    (ObjectKind::Issue, "Issues/List", "issues", "Issue"),
    (ObjectKind::Token, "Credentials/List", "credentials", "Credential"),
    (ObjectKind::Artefact, "Artefacts/List", "artefacts", "Artefact"),
    (ObjectKind::Audit, "Audit/List", "records", "AuditRecord"),
];

/// The responses in the document of `top`: their field, call, request and message.
const TOP: [(&str, &str, &str, &str); 4] = [
    ("statistics", "Statistics/Get", "{}", "GetStatisticsResponse"),
    ("loops", "Loops/List", "{}", "ListLoopsResponse"),
    ("work", "Work/List", r#"{"pageSize": 500}"#, "ListWorkResponse"),
    ("providers", "Providers/List", "{}", "ListProvidersResponse"),
];

/// The pieces of a stream as one: each list is continued, and of other fields the first one counts.
fn join_pieces(pieces: &[Value]) -> Value {
    let mut whole = Map::new();
    for (name, value) in pieces.iter().filter_map(Value::as_object).flatten() {
        match (whole.get_mut(name), value) {
            (Some(Value::Array(list)), Value::Array(more)) => list.extend(more.iter().cloned()),
            (Some(_), _) => {}
            (None, value) => {
                whole.insert(name.clone(), value.clone());
            }
        }
    }
    Value::Object(whole)
}

/// The API's answer over HTTP: the last page, with the list of all pages.
async fn answer_of(
    api: &Api,
    key: &Key,
    rpc: &str,
    request: &str,
    form: DocumentForm,
) -> anyhow::Result<Value> {
    let mut request: Value = serde_json::from_str(request)?;
    let mut lines = Vec::new();
    loop {
        let answer = api.call(Some(&key.token), rpc, request.clone()).await?.ok()?;
        let mut page = match answer {
            Value::Array(pieces) => join_pieces(&pieces),
            answer => answer,
        };
        let (List(list) | Object(list)) = form else { return Ok(page) };
        let listed = page[list].as_array_mut().with_context(|| format!("{rpc} has no {list}"))?;
        lines.append(listed);
        let next = page["nextPageToken"].as_str().unwrap_or_default().to_owned();
        if !next.is_empty() {
            request["pageToken"] = json!(next);
            continue;
        }
        if matches!(form, Object(_)) {
            ensure!(lines.len() == 1, "{rpc} has {} of {list}", lines.len());
            return Ok(lines.remove(0));
        }
        page[list] = Value::Array(lines);
        return Ok(page);
    }
}

/// Removes the moments of a document, and the sentences that state how long ago something was.
fn without_moments(document: &mut Value) {
    match document {
        Value::String(text) => {
            let is_moment = text.len() >= 20
                && text.ends_with('Z')
                && text.as_bytes().get(10) == Some(&b'T')
                && text.starts_with(|first: char| first.is_ascii_digit());
            if is_moment {
                "[moment]".clone_into(text);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(without_moments),
        Value::Object(fields) => {
            fields.remove("notes");
            fields.values_mut().for_each(without_moments);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Checks a value by a schema of the OpenAPI document: its type, and that each field is one of the message.
fn check(value: &Value, schema: &Value, schemas: &Value, path: &str) -> anyhow::Result<()> {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.rsplit('/').next().unwrap_or_default();
        let referred = schemas.get(name).with_context(|| format!("{path}: there is no schema {name}"))?;
        return check(value, referred, schemas, path);
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let permits = |of: &str| of == kind || (of == "number" && kind == "integer");
    let permitted = match &schema["type"] {
        Value::String(of) => permits(of),
        Value::Array(several) => several.iter().filter_map(Value::as_str).any(permits),
        // Any value of a structure.
        _ => true,
    };
    ensure!(permitted, "{path} is {kind}, and not {}", schema["type"]);
    if let Some(names) = schema["enum"].as_array() {
        ensure!(names.contains(value), "{path} is {value}, and not one of {names:?}");
    }
    if let (Some("int64" | "uint64"), Value::String(text)) = (schema["format"].as_str(), value) {
        text.parse::<i128>().with_context(|| format!("{path} is {text:?}"))?;
    }
    match value {
        Value::Array(items) => {
            for (number, item) in items.iter().enumerate() {
                check(item, &schema["items"], schemas, &format!("{path}[{number}]"))?;
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                let path = format!("{path}.{name}");
                let of_field = schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
                ensure!(*of_field != Value::Bool(false), "{path} is no field of the message");
                check(field, of_field, schemas, &path)?;
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
    Ok(())
}

/// The ways to read a fleet.
struct DocumentSources<'a> {
    kim: Operator<'a>,
    key: Key,
    schemas: Value,
}

impl DocumentSources<'_> {
    /// What the command prints with the context. It is the same as with `--direct`, and as what `answer` returns. All
    /// are read again if time has passed between them.
    async fn one_document(
        &self,
        arguments: &[&str],
        answer: impl AsyncFn() -> anyhow::Result<Value>,
    ) -> anyhow::Result<Value> {
        let arguments = [arguments, &["-o", "json"]].concat();
        let mut difference = String::new();
        for _ in 0..MAX_READS {
            let through: Value = serde_json::from_str(&self.kim.ask(&arguments)?)?;
            let direct = serde_json::from_str(&self.kim.direct(&arguments)?)?;
            let mut documents = [through.clone(), direct, answer().await?];
            documents.iter_mut().for_each(without_moments);
            let [ours, direct, api] = documents;
            if ours == direct && ours == api {
                return Ok(through);
            }
            difference = format!("{ours:#}\nwith --direct\n{direct:#}\nand the API answers\n{api:#}");
        }
        bail!("{arguments:?} prints\n{difference}");
    }

    fn check(&self, document: &Value, message: &str, what: &str) -> anyhow::Result<()> {
        let schema = json!({ "$ref": format!("#/components/schemas/{message}") });
        check(document, &schema, &self.schemas, message).with_context(|| what.to_owned())
    }
}

/// The document of each object that `get` names, and the object in the list of the API.
async fn describe_each(
    api: &Api,
    sources: &DocumentSources<'_>,
    (kind, rpc, list, message): (ObjectKind, &str, &'static str, &str),
) -> anyhow::Result<()> {
    let (plural, singular) = (kind.row().plural, kind.row().singular);
    let names = sources.kim.ask(&["get", plural, "-o", "name"])?;
    ensure!(!names.is_empty(), "there are no {plural}");
    for (index, name) in names.lines().take(MAX_DESCRIBED).enumerate() {
        let object = async || {
            let whole = answer_of(api, &sources.key, rpc, "{}", List(list)).await?;
            anyhow::Ok(whole[list][index].clone())
        };
        let document = sources.one_document(&["describe", singular, name], object).await?;
        sources.check(&document, message, &format!("describe {singular} {name}"))?;
    }
    Ok(())
}

#[test]
fn every_reading_command_has_its_document() {
    for (path, _) in READS {
        let is_listed =
            DOCUMENTS.iter().any(|(line, ..)| line == path || line.starts_with(&format!("{path} ")));
        let has_page =
            GENERIC_PAGES.iter().any(|(kind, ..)| *path == format!("describe {}", kind.row().singular));
        assert!(is_listed || has_page || *path == "top", "`{path}` is not compared with the API");
    }
}

#[test]
fn schema_is_followed_to_the_last_field() {
    let schemas = json!({
        "Wait": { "type": "object", "additionalProperties": false, "properties": {
            "until": { "type": ["string", "null"] }, "count": { "type": "string", "format": "int64" },
            "labels": { "type": "object", "additionalProperties": { "type": "string" } },
        }},
    });
    let list = json!({ "type": "array", "items": { "$ref": "#/components/schemas/Wait" } });
    for (value, expected) in [
        (json!([{ "until": null, "count": "-7", "labels": { "a": "b" } }]), None),
        (json!([{}, { "at": "x" }]), Some("list[1].at is no field of the message")),
        (json!([{ "count": 7 }]), Some("list[0].count is integer, and not \"string\"")),
        (json!([{ "count": "seven" }]), Some("list[0].count is \"seven\"")),
        (json!([{ "labels": { "a": 1 } }]), Some("list[0].labels.a is integer, and not \"string\"")),
        (json!({}), Some("list is object, and not \"array\"")),
    ] {
        let found = check(&value, &list, &schemas, "list").err().map(|error| error.to_string());
        assert_eq!(found.as_deref(), expected, "{value}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_reading_command_prints_the_document_of_the_api() -> TestResult {
    let api = Api::start("api_documents").await?;
    let machine = populate(&api).await?;
    for statement in [
        "INSERT INTO provider_state (provider, kind, listed_at, machines)
         VALUES ('rack', 'static', clock_timestamp(), 2)",
        "INSERT INTO approval (approval_id, actor, idempotency_key, rpc, request, target, reason, requested_at,
             expires_at)
         SELECT gen_random_uuid(), 'lee@a', 'k', 'r', decode('00', 'hex'), 't', 'r', clock_timestamp(),
                clock_timestamp() + INTERVAL '1 hour'",
    ] {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let key = api.key(AccessRole::Admin, &[], None).await?;
    let described: Value = api.http.get(api.url("/openapi.json")).send().await?.json().await?;
    let sources = DocumentSources { kim, key, schemas: described["components"]["schemas"].clone() };

    for (line, rpc, request, form, message) in DOCUMENTS {
        let arguments: Vec<&str> =
            line.split(' ').map(|word| if word == "M" { machine.as_str() } else { word }).collect();
        let request = request.replace("\"M\"", &json!(machine).to_string());
        let answer = async || answer_of(&api, &sources.key, rpc, &request, *form).await;
        let document = sources.one_document(&arguments, answer).await?;
        sources.check(&document, message, line)?;
    }
    for row in GENERIC_PAGES {
        describe_each(&api, &sources, *row).await?;
    }

    let parts = async || {
        let mut whole = Map::new();
        for (field, rpc, request, _) in TOP {
            whole.insert(field.to_owned(), answer_of(&api, &sources.key, rpc, request, Response).await?);
        }
        anyhow::Ok(Value::Object(whole))
    };
    let document = sources.one_document(&["top"], parts).await?;
    for (field, _, _, message) in TOP {
        sources.check(&document[field], message, "top")?;
    }

    // Each name that a list prints is described, and the page has that name.
    for row in &KINDS {
        let names = sources.kim.ask(&["get", row.plural, "-o", "name"])?;
        assert!(!names.is_empty(), "there are no {}", row.plural);
        for name in names.lines().take(MAX_DESCRIBED) {
            let page = sources.kim.ask(&["describe", row.singular, name])?;
            assert!(!page.is_empty(), "describe {} {name}", row.singular);
            let again = sources.kim.ask(&["describe", row.singular, name, "-o", "name"])?;
            assert_eq!(again, format!("{name}\n"), "describe {}", row.singular);
        }
    }
    Ok(api.stop().await?)
}
