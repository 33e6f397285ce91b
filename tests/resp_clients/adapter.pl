# Runs commands of the scenario with Redis.pm: `adapter.pl PORT PASSWORD`.
use strict;
use warnings;
use Redis;
my ($port, $password) = @ARGV;
my %clients;
$| = 1;

sub client {
    my ($number) = @_;
    my @password = $password eq '' ? () : (password => $password);
    return $clients{$number} //= Redis->new(server => "127.0.0.1:$port", @password);
}

sub shown {
    my ($reply) = @_;
    return '[' . join(',', map { shown($_) } @$reply) . ']' if ref $reply eq 'ARRAY';
    # The library makes no difference between numbers and texts.
    return "\"$reply\"";
}

while (my $line = <STDIN>) {
    chomp $line;
    my ($number, @words) = split /\t/, $line;
    my $redis = client($number);
    my $reply = eval {
        if ($words[0] eq 'PIPELINE') {
            my $sum = 0;
            for my $id (0 .. $words[1] - 1) {
                $redis->__std_cmd('aw.add', "$id", sub { $sum += $_[0][0] });
            }
            $redis->wait_all_responses;
            return "\"$sum\"";
        }
        my ($command, @rest) = @words;
        return shown(scalar $redis->__std_cmd(lc $command, @rest));
    };
    print defined $reply ? "$reply\n" : 'error ' . ($@ =~ s/^\[[^\]]*\] //r =~ s/,? at .*//sr) . "\n";
}
