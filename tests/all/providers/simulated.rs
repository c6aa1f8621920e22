//! The provider of simulated machines.

use shepherd::model::ids::IntentId;
use shepherd::providers::provider::{ErrorClass, PowerAction, Provider};
use shepherd::providers::simulated::SimulatedProvider;

use super::{Deed, Harness, conforms};
use crate::simulator::Running;

struct Simulated {
    provider: SimulatedProvider,
    running: Running,
}

impl Harness for Simulated {
    fn provider(&self) -> &dyn Provider {
        &self.provider
    }

    fn break_list(&self) -> Deed<'_> {
        Box::pin(self.running.strike("provider", "list-torn"))
    }

    fn mend_list(&self) -> Deed<'_> {
        Box::pin(self.running.strike("provider", "heal"))
    }
}

#[tokio::test]
async fn a_simulated_fleet_conforms() {
    let directory = tempfile::tempdir().unwrap();
    let running =
        Running::start(directory.path(), &["--machine_count", "5", "--boot_seconds", "0"]).await.unwrap();
    let provider = running.provider().unwrap();
    let harness = Simulated { provider, running };
    conforms(&harness).await.unwrap();
    harness.running.stop().await.unwrap();
}

#[tokio::test]
async fn a_simulated_provider_tells_busy_from_impossible() {
    let directory = tempfile::tempdir().unwrap();
    let running = Running::start(directory.path(), &["--machine_count", "1"]).await.unwrap();
    let provider = running.provider().unwrap();
    let creation = provider.creation().unwrap();
    let made = creation.create(IntentId::generate(), None).await.unwrap();
    let error = creation.create(IntentId::generate(), None).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Permanent, "all capacity is taken: {error:?}");
    running.strike(&made.id, "power-fail").await.unwrap();
    let power = provider.power().unwrap();
    let error = power.set_power(&made.id, PowerAction::Cycle, IntentId::generate()).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(error.message.contains("power control does not answer"), "{}", error.message);
    running.strike("provider", "list-error").await.unwrap();
    assert_eq!(provider.list().await.unwrap_err().class, ErrorClass::Transient);
    running.strike("provider", "list-empty").await.unwrap();
    assert_eq!(provider.list().await.unwrap(), [], "an empty list is well-formed, and for a brake to doubt");
    running.stop().await.unwrap();
}
