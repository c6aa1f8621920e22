//! Watches the migrations: the schema module embeds them, and cargo does not see that.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
}
