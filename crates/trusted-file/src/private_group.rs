//! The private group of a user: a group that nobody else is in.
//!
//! Many distributions create a group of the same name with each user, and set a umask of 002 for such users. Their files
//! are writable for a group that nobody else is in. OpenSSH of Debian accepts `authorized_keys` with such bits for the
//! same reason.
//!
//! A group is only believed to be private if `/etc/passwd` and `/etc/group` show it. Members that a directory service
//! adds to a local group are not seen. A user of a directory service has no private group here.

/// The private group of a user, by the files of this host. `None` if the user has none, or a file cannot be read.
#[must_use]
pub fn read_private_group(user: u32) -> Option<u32> {
    let users = std::fs::read_to_string("/etc/passwd").ok()?;
    let groups = std::fs::read_to_string("/etc/group").ok()?;
    find_private_group(user, &users, &groups)
}

/// Finds the private group of a user in the content of `/etc/passwd` and of `/etc/group`: the primary group of this user
/// alone, with the name of the user, and without other members.
fn find_private_group(user: u32, users: &str, groups: &str) -> Option<u32> {
    // The umask is 022 for root, and containers run many users in its group.
    if user == 0 {
        return None;
    }
    let users: Vec<_> = parse_entries(users).collect();
    let groups: Vec<_> = parse_entries(groups).collect();
    // Such an entry adds users and groups of NIS, which are not in the files.
    let is_of_nis = |entry: &Vec<&str>| entry.first().is_some_and(|name| name.starts_with(['+', '-']));
    if users.iter().chain(&groups).any(is_of_nis) {
        return None;
    }
    let group = parse_id(find_only(&users, 2, user)?, 3)?;
    let account = find_only(&users, 3, group).filter(|account| parse_id(account, 2) == Some(user))?;
    let entry = find_only(&groups, 2, group)?;
    let name = account.first()?;
    let members = entry.get(3).copied().unwrap_or_default();
    let is_alone = members.split(',').map(str::trim).all(|member| member.is_empty() || member == *name);
    (entry.first() == Some(name) && is_alone).then_some(group)
}

/// The entries of a file, each with its fields.
fn parse_entries(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split(':').collect())
}

fn parse_id(entry: &[&str], field: usize) -> Option<u32> {
    entry.get(field)?.trim().parse().ok()
}

/// The entry with this number in a field; `None` if there is none, or more than one.
fn find_only<'a>(entries: &'a [Vec<&'a str>], field: usize, id: u32) -> Option<&'a [&'a str]> {
    let mut matching = entries.iter().filter(|entry| parse_id(entry, field) == Some(id));
    match (matching.next(), matching.next()) {
        (Some(entry), None) => Some(entry),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "root:x:0:0:root:/root:/bin/bash\n\
                         # a comment\n\
                         kim:x:1000:1000:Kim,,,:/home/kim:/bin/bash\n\
                         lee:x:1001:100::/home/lee:/bin/sh\n";
    const GROUPS: &str = "root:x:0:\nusers:x:100:\nkim:x:1000:\n";

    #[test]
    fn group_is_private_when_nobody_else_is_in_it() {
        let more = |text: &str, line: &str| format!("{text}{line}\n");
        let groups = |line: &str| GROUPS.replace("kim:x:1000:\n", line);
        for (user, users, groups, expected) in [
            (1000, USERS.to_owned(), GROUPS.to_owned(), Some(1000)),
            (1000, USERS.to_owned(), groups("kim:x:1000:kim\n"), Some(1000)),
            (1000, USERS.to_owned(), groups("kim:x:1000\n"), Some(1000)),
            // Another member.
            (1000, USERS.to_owned(), groups("kim:x:1000:lee\n"), None),
            (1000, USERS.to_owned(), groups("kim:x:1000:kim,lee\n"), None),
            // A group of another name, none at all, and two of one number.
            (1000, USERS.to_owned(), groups("staff:x:1000:\n"), None),
            (1000, USERS.to_owned(), groups(""), None),
            (1000, USERS.to_owned(), more(GROUPS, "staff:x:1000:lee"), None),
            // The primary group of another user, too.
            (1000, more(USERS, "max:x:1002:1000::/:/bin/sh"), GROUPS.to_owned(), None),
            // Two names of one user.
            (1000, more(USERS, "mim:x:1000:1000::/:/bin/sh"), GROUPS.to_owned(), None),
            // Users and groups of NIS.
            (1000, more(USERS, "+::::::"), GROUPS.to_owned(), None),
            (1000, USERS.to_owned(), more(GROUPS, "+:::"), None),
            // A shared primary group, an unknown user, and root.
            (1001, USERS.to_owned(), GROUPS.to_owned(), None),
            (1003, USERS.to_owned(), GROUPS.to_owned(), None),
            (0, USERS.to_owned(), GROUPS.to_owned(), None),
            (1000, String::new(), String::new(), None),
        ] {
            assert_eq!(find_private_group(user, &users, &groups), expected, "{user}\n{users}\n{groups}");
        }
    }
}
