//! The login of a session: the method of the settings, and the error for a host that lets nobody in by it.

use russh::client::{AuthResult, KeyboardInteractiveAuthResponse};
use russh::keys::PrivateKeyWithHashAlg;
use russh::{MethodKind, MethodSet};
use secrecy::{ExposeSecret, SecretString};

use crate::session::{LOGIN_FLAG, LoginMethod, SshSession, SshSettings, SshTarget};
use crate::ssh_error::SshError;
use crate::time_limit::TimeLimit;

impl SshSession {
    /// Logs in by the method of the settings.
    pub(super) async fn log_in(
        &mut self,
        settings: &SshSettings,
        target: &SshTarget,
    ) -> Result<(), SshError> {
        const OPERATION: &str = "logging in";
        let limit = TimeLimit::new(settings.login_timeout, LOGIN_FLAG, self.deadline);
        let outcome = limit.run(self.authenticate(settings, &target.user)).await;
        match outcome {
            Err(_) => Err(limit.exceeded_error(&self.address, OPERATION)),
            Ok(Err(error)) => Err(error),
            Ok(Ok(LoginAttempt { success: true, .. })) => Ok(()),
            Ok(Ok(attempt)) => {
                if attempt.remaining.is_empty() && self.handle.is_closed() {
                    return Err(self.connection_lost(OPERATION).await);
                }
                Err(self.login_error(settings, target, attempt))
            }
        }
    }

    /// The error for a host that did not let us in.
    fn login_error(&self, settings: &SshSettings, target: &SshTarget, attempt: LoginAttempt) -> SshError {
        let (address, user) = (self.address.clone(), target.user.as_str().into());
        let named: Vec<String> = attempt.remaining.iter().map(String::from).collect();
        let message = self.login_message.get().map(Box::new);
        if attempt.accepted.is_empty() {
            let public_key = settings.key.authorized_keys_line().into();
            let tried = attempt.tried;
            SshError::AuthenticationRejected { address, user, tried, accepted: named, message, public_key }
        } else {
            let has_password = matches!(settings.login, LoginMethod::Password(_));
            let LoginAttempt { mut tried, accepted, .. } = attempt;
            tried.retain(|method| !accepted.contains(method));
            SshError::SecondFactorRequired {
                address: address.into(),
                user,
                accepted,
                refused: tried.into(),
                required: named,
                message,
                has_password,
            }
        }
    }

    /// Tries the method of the settings, and no other.
    async fn authenticate(&mut self, settings: &SshSettings, user: &str) -> Result<LoginAttempt, SshError> {
        match &settings.login {
            LoginMethod::Key => {
                let mut attempt = LoginAttempt::new();
                self.authenticate_by_key(settings, user, &mut attempt).await?;
                Ok(attempt)
            }
            LoginMethod::Password(password) => self.authenticate_by_password(settings, user, password).await,
        }
    }

    async fn authenticate_by_key(
        &mut self,
        settings: &SshSettings,
        user: &str,
        attempt: &mut LoginAttempt,
    ) -> Result<(), SshError> {
        let key = PrivateKeyWithHashAlg::new(settings.key.private_key(), None);
        let answer = self.handle.authenticate_publickey(user, key).await;
        attempt.record(Some("publickey"), self.login_answer(answer).await?);
        Ok(())
    }

    /// Tries the password, then the same password as the response to a single hidden prompt, if the host takes them. A
    /// host that takes none of them before a key gets the key first.
    async fn authenticate_by_password(
        &mut self,
        settings: &SshSettings,
        user: &str,
        password: &SecretString,
    ) -> Result<LoginAttempt, SshError> {
        let mut attempt = LoginAttempt::new();
        // The answer to this request names the methods that the host takes.
        let answer = self.handle.authenticate_none(user).await;
        attempt.record(None, self.login_answer(answer).await?);
        let takes_passwords =
            attempt.takes(MethodKind::Password) || attempt.takes(MethodKind::KeyboardInteractive);
        if !takes_passwords && attempt.takes(MethodKind::PublicKey) {
            self.authenticate_by_key(settings, user, &mut attempt).await?;
        }
        if attempt.takes(MethodKind::Password) {
            let answer = self.handle.authenticate_password(user, password.expose_secret()).await;
            attempt.record(Some("password"), self.login_answer(answer).await?);
        }
        if attempt.takes(MethodKind::KeyboardInteractive) {
            let answer = self.answer_prompts(user, password).await;
            attempt.record(Some("keyboard-interactive"), self.login_answer(answer).await?);
        }
        Ok(attempt)
    }

    async fn answer_prompts(
        &mut self,
        user: &str,
        password: &SecretString,
    ) -> Result<AuthResult, russh::Error> {
        let mut answer = self.handle.authenticate_keyboard_interactive_start(user, None).await?;
        // PAM prompts once, then sends an empty round. Further prompts of a host are not answered with this password.
        for _ in 0..4 {
            match answer {
                KeyboardInteractiveAuthResponse::Success => return Ok(AuthResult::Success),
                KeyboardInteractiveAuthResponse::Failure { remaining_methods, partial_success } => {
                    return Ok(AuthResult::Failure { remaining_methods, partial_success });
                }
                KeyboardInteractiveAuthResponse::InfoRequest { instructions, prompts, .. } => {
                    self.login_message.set(&instructions);
                    let answers =
                        prompts
                            .iter()
                            .map(|prompt| {
                                if prompt.echo { String::new() } else { password.expose_secret().to_owned() }
                            })
                            .collect();
                    answer = self.handle.authenticate_keyboard_interactive_respond(answers).await?;
                }
            }
        }
        Ok(AuthResult::Failure { remaining_methods: MethodSet::empty(), partial_success: false })
    }

    /// The answer to a login request; an error if the connection ended instead.
    async fn login_answer(&self, answer: Result<AuthResult, russh::Error>) -> Result<AuthResult, SshError> {
        match answer.ok() {
            Some(answer) => Ok(answer),
            None => Err(self.connection_lost("logging in").await),
        }
    }
}

/// What a login has come to.
struct LoginAttempt {
    success: bool,
    /// The methods that were tried, in order.
    tried: Vec<&'static str>,
    /// Those of them that the host accepted as one of several that it requires.
    accepted: Vec<&'static str>,
    /// The methods that the host still takes.
    remaining: MethodSet,
}

impl LoginAttempt {
    fn new() -> Self {
        Self { success: false, tried: Vec::new(), accepted: Vec::new(), remaining: MethodSet::empty() }
    }

    /// Records the host's answer to a method.
    fn record(&mut self, method: Option<&'static str>, answer: AuthResult) {
        self.tried.extend(method);
        match answer {
            AuthResult::Success => self.success = true,
            AuthResult::Failure { remaining_methods, partial_success } => {
                self.accepted.extend(method.filter(|_| partial_success));
                self.remaining = remaining_methods;
            }
        }
    }

    /// Whether the host is not logged in to yet, and takes this method.
    fn takes(&self, method: MethodKind) -> bool {
        !self.success && self.remaining.contains(&method)
    }
}
