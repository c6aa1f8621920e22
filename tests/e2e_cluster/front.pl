# A small HTTP service: answers every request with hello.
use strict;
use warnings;
use IO::Socket::INET;

my $listener = IO::Socket::INET->new(LocalPort => PORT, Listen => 64, ReuseAddr => 1) or die "listening failed: $!\n";
while (my $peer = $listener->accept) {
    # A client that sends no request is disconnected after a second, because it would keep all others waiting.
    $SIG{ALRM} = sub { $peer->shutdown(2) };
    alarm 1;
    while (defined(my $line = <$peer>)) { last if $line =~ /^\r?\n$/ }
    alarm 0;
    print $peer "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n";
    close $peer;
}
