//! Look up the user and the groups a service runs as.
//!
//! The files `passwd(5)` and `group(5)` are read directly. Users of a directory service on the network are not found: a
//! role server that starts services before there is a network must not wait for one.

use std::fs;

use crate::child::spec::User;

/// A user and all its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// User ID and primary group ID.
    pub user: User,
    /// Supplementary groups, sorted and without the primary one.
    pub groups: Vec<u32>,
}

/// The account with this name or number on this host; the error is a sentence.
pub fn find_account(user: &str) -> Result<Account, String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    parse_account(user, &read("/etc/passwd"), &read("/etc/group"))
}

/// The account with this name or number in the text of these two files.
///
/// A number without an account is used as user ID and as group ID: many services run as such a user.
fn parse_account(user: &str, passwd: &str, group: &str) -> Result<Account, String> {
    let number = user.parse::<u32>().ok();
    let known = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, uid, gid) = (fields.next()?, fields.nth(1)?, fields.next()?);
        let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
        let is_it = number.map_or(name == user, |number| number == uid);
        is_it.then_some((name, User { uid, gid }))
    });
    match (known, number) {
        (Some((name, user)), _) => Ok(Account { user, groups: supplementary_groups(name, user.gid, group) }),
        (None, Some(number)) => Ok(Account { user: User { uid: number, gid: number }, groups: Vec::new() }),
        (None, None) if user == "root" => Ok(Account { user: User { uid: 0, gid: 0 }, groups: Vec::new() }),
        (None, None) => Err(format!(
            "there is no user {user} on this node: make one, or declare the service with another"
        )),
    }
}

fn supplementary_groups(name: &str, first: u32, group: &str) -> Vec<u32> {
    let member = group.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (gid, members) = (fields.nth(2)?, fields.next()?);
        let gid = gid.parse().ok().filter(|gid| *gid != first)?;
        members.split(',').any(|member| member == name).then_some(gid)
    });
    let mut groups: Vec<u32> = member.collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "\
root:x:0:0:root:/root:/bin/bash
damaged line
web:x:33:34:web:/var/www:/usr/sbin/nologin
";
    const GROUP: &str = "\
root:x:0:
web:x:34:web
ssl-cert:x:110:postgres,web
logs:x:4:syslog
tapes:x:26:web
";

    #[test]
    fn account_is_that_of_the_name_or_of_the_number() {
        let web = Account { user: User { uid: 33, gid: 34 }, groups: vec![26, 110] };
        for (user, expected) in [
            ("web", web.clone()),
            ("33", web),
            ("root", Account { user: User { uid: 0, gid: 0 }, groups: vec![] }),
            ("0", Account { user: User { uid: 0, gid: 0 }, groups: vec![] }),
            ("4711", Account { user: User { uid: 4711, gid: 4711 }, groups: vec![] }),
        ] {
            assert_eq!(parse_account(user, PASSWD, GROUP), Ok(expected), "{user}");
        }
        assert_eq!(parse_account("root", "", "").unwrap().user, User { uid: 0, gid: 0 });
        let error = parse_account("nobody-here", PASSWD, GROUP).unwrap_err();
        assert!(error.starts_with("there is no user nobody-here on this node"), "{error}");
    }
}
