//! The two keys of a host. They are made once, before the database; a key that is missing or
//! wrong while the database is there is an error, never a reason for a new one.

use std::fmt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use hmac::{Hmac, KeyInit as _, Mac as _};
use pasetors::keys::{AsymmetricKeyPair, AsymmetricPublicKey, AsymmetricSecretKey, Generate as _};
use pasetors::token::UntrustedToken;
use pasetors::version4::{PublicToken, V4};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

use super::error::Error;
use super::files;
use crate::model::ticket::Ticket;

/// What a signed statement is about; bound into the signature, so that an anchor is no ticket.
const TICKET: &[u8] = b"overfence mount ticket v1";
pub(super) const ANCHOR: &[u8] = b"overfence evidence anchor v1";

/// Authenticates records.
pub struct RecordKey {
    id: String,
    secret: [u8; 32],
}

/// Signs tickets and anchors.
pub struct TicketKey {
    id: String,
    secret: AsymmetricSecretKey<V4>,
    public: PublicKey,
}

/// Verifies tickets and anchors; no secret.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

impl fmt::Debug for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecordKey({})", self.id)
    }
}

impl fmt::Debug for TicketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketKey({})", self.id)
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.id())
    }
}

fn id_of(kind: &str, material: &[u8]) -> String {
    let hash = Sha256::new().chain_update(kind).chain_update([0]).chain_update(material).finalize();
    format!("{kind}-{}", hex::encode(&hash[..8]))
}

impl RecordKey {
    fn from_secret(secret: [u8; 32]) -> Self {
        Self { id: id_of("record", &secret), secret }
    }

    /// Its public name.
    pub fn id(&self) -> &str {
        &self.id
    }

    fn mac_over(&self, parts: [&str; 3]) -> Hmac<Sha256> {
        // HMAC takes a key shorter than its block as that key followed by zeros.
        let mut block = [0; 64];
        block[..32].copy_from_slice(&self.secret);
        let mut mac = Hmac::<Sha256>::new(&block.into());
        for part in parts {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part.as_bytes());
        }
        mac
    }

    /// The code over a record: of which table, of which id, its text.
    pub fn seal(&self, table: &str, id: &str, text: &str) -> [u8; 32] {
        self.mac_over([table, id, text]).finalize().into_bytes().into()
    }

    /// Whether `mac` is the code over the record; takes the same time whatever differs.
    pub fn fits(&self, table: &str, id: &str, text: &str, mac: &[u8]) -> bool {
        self.mac_over([table, id, text]).verify_slice(mac).is_ok()
    }
}

impl TicketKey {
    fn from_secret(secret: &[u8]) -> Result<Self, String> {
        let secret = AsymmetricSecretKey::<V4>::from(secret).map_err(|e| e.to_string())?;
        let public = AsymmetricPublicKey::<V4>::try_from(&secret).map_err(|e| e.to_string())?;
        let public = PublicKey::from_bytes(public.as_bytes()).ok_or("its length is wrong")?;
        Ok(Self { id: public.id(), secret, public })
    }

    /// Its public name, also in the footer of what it signs.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The half that verifies.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Signs a mount ticket: a PASETO v4.public token.
    ///
    /// # Errors
    /// The ticket cannot be written as JSON or the key does not sign.
    pub fn sign_ticket(&self, ticket: &Ticket) -> Result<String, Error> {
        self.sign(ticket, TICKET)
    }

    pub(super) fn sign(&self, what: &impl Serialize, about: &[u8]) -> Result<String, Error> {
        let text = serde_json::to_vec(what)
            .map_err(|source| Error::Text { what: "signed statement", source })?;
        PublicToken::sign(&self.secret, &text, Some(self.id.as_bytes()), Some(about))
            .map_err(|e| Error::Statement { why: format!("could not be signed: {e}") })
    }
}

impl PublicKey {
    /// From the 32 bytes of an Ed25519 public key.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(bytes.try_into().ok()?))
    }

    /// Reads the text of a `ticket.pub` file.
    ///
    /// # Errors
    /// It is not such a file.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let raw = parse_line("ticket-public", text).map_err(|why| Error::Statement { why })?;
        Self::from_bytes(&raw)
            .ok_or_else(|| Error::Statement { why: "a public key has 32 bytes".to_owned() })
    }

    /// The text of a `ticket.pub` file.
    pub fn to_text(&self) -> String {
        line("ticket-public", &self.id(), &self.0)
    }

    /// Its name, that of the secret key too.
    pub fn id(&self) -> String {
        id_of("ticket", &self.0)
    }

    /// What a ticket states, if this key signed it.
    ///
    /// # Errors
    /// [`Error::Statement`]: another key's, altered, or no ticket.
    pub fn verify_ticket(&self, token: &str) -> Result<Ticket, Error> {
        self.verify(token, TICKET)
    }

    pub(super) fn verify<T: DeserializeOwned>(
        &self,
        token: &str,
        about: &[u8],
    ) -> Result<T, Error> {
        let bad = |why: String| Error::Statement { why };
        let token = UntrustedToken::try_from(token.trim())
            .map_err(|_| bad("it is not a PASETO v4.public token".to_owned()))?;
        if token.untrusted_footer() != self.id().as_bytes() {
            let footer = String::from_utf8_lossy(token.untrusted_footer()).into_owned();
            return Err(bad(format!("it names key {footer:?}, not {}", self.id())));
        }
        let public = AsymmetricPublicKey::<V4>::from(&self.0)
            .map_err(|e| bad(format!("the public key is not valid: {e}")))?;
        let trusted = PublicToken::verify(&public, &token, None, Some(about))
            .map_err(|_| bad("its signature does not fit".to_owned()))?;
        serde_json::from_str(trusted.payload()).map_err(|e| bad(format!("its content: {e}")))
    }
}

/// Both keys.
#[derive(Debug)]
pub struct Keys {
    /// For records.
    pub record: RecordKey,
    /// For statements.
    pub ticket: TicketKey,
}

impl Keys {
    /// Reads the keys in `dir`; makes those that are missing only if `first_start`.
    ///
    /// # Errors
    /// A key is missing, damaged, or readable by others.
    pub fn open(dir: &Path, first_start: bool) -> Result<Self, Error> {
        files::make_dir(dir)?;
        let (record, ticket) = (dir.join("record.key"), dir.join("ticket.key"));
        let secret = read_or_make(&record, "record", first_start, || {
            let mut secret = [0; 32];
            getrandom::fill(&mut secret).map_err(|e| e.to_string())?;
            Ok((RecordKey::from_secret(secret).id, secret.to_vec()))
        })?;
        let secret: [u8; 32] =
            secret.try_into().map_err(|_| wrong(&record, "it does not have 32 bytes"))?;
        let record = RecordKey::from_secret(secret);
        let secret = read_or_make(&ticket, "ticket", first_start, || {
            let pair = AsymmetricKeyPair::<V4>::generate().map_err(|e| e.to_string())?;
            let secret = pair.secret.as_bytes().to_vec();
            Ok((TicketKey::from_secret(&secret)?.id, secret))
        })?;
        let ticket = TicketKey::from_secret(&secret).map_err(|why| wrong(&ticket, &why))?;
        let public = dir.join("ticket.pub");
        let text = ticket.public.to_text();
        if std::fs::read_to_string(&public).is_ok_and(|there| there == text) {
            return Ok(Self { record, ticket });
        }
        files::replace(&public, text.as_bytes(), 0o644)?;
        Ok(Self { record, ticket })
    }
}

fn wrong(path: &Path, why: &str) -> Error {
    Error::Key { path: path.to_owned(), why: why.to_owned() }
}

fn line(kind: &str, id: &str, raw: &[u8]) -> String {
    format!("{kind} {id} {}\n", hex::encode(raw))
}

fn parse_line(kind: &str, text: &str) -> Result<Vec<u8>, String> {
    let fields: Vec<&str> = text.split_whitespace().collect();
    match fields[..] {
        [k, _, raw] if k == kind => {
            hex::decode(raw).map_err(|_| "its digits are not hexadecimal".to_owned())
        }
        _ => Err(format!("it is not a line `{kind} ID HEX`")),
    }
}

fn read_or_make(
    path: &PathBuf,
    kind: &'static str,
    first_start: bool,
    make: impl FnOnce() -> Result<(String, Vec<u8>), String>,
) -> Result<Vec<u8>, Error> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let mode = std::fs::metadata(path).map_err(Error::io("stat", path))?.permissions();
            if mode.mode() & 0o077 != 0 {
                let why = format!("mode {:o} lets others at it; chmod 600", mode.mode() & 0o7777);
                return Err(wrong(path, &why));
            }
            parse_line(kind, &text).map_err(|why| wrong(path, &why))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && first_start => {
            let (id, secret) = make().map_err(|why| wrong(path, &why))?;
            files::replace(path, line(kind, &id, &secret).as_bytes(), 0o600)?;
            Ok(secret)
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(wrong(path, "it is missing although the database is there"))
        }
        Err(e) => Err(Error::io("read", path)(e)),
    }
}
