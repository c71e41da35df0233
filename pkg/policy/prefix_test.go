// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"net/netip"
	"strings"
	"testing"
	"unicode"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestParsePrefix(t *testing.T) {
	for _, s := range []string{"10.0.0.0/8", "0.0.0.0/0", "192.0.2.1/32", "fd00::/8", "::/0", "2001:db8::1/128", "::ffff:0:0:0/80"} {
		p, err := policy.ParsePrefix(s)
		if err != nil || p != netip.MustParsePrefix(s) {
			t.Errorf("ParsePrefix(%q) = %v, %v", s, p, err)
		}
	}
}

func TestParsePrefixSaysWhatToWrite(t *testing.T) {
	const notOne = "is not a CIDR; write address/length, such as 10.0.0.0/8 or fd00::/8"
	const empty = "is empty; write a CIDR such as 10.0.0.0/8, or drop the item"
	for _, tt := range []struct{ in, want string }{
		{"", empty},
		{" \t", empty},
		{"10.0.1.24/24", "has host bits set; did you mean 10.0.1.0/24?"},
		{"10.0.0.1/0", "has host bits set; did you mean 0.0.0.0/0?"},
		{"fd00::1/8", "has host bits set; did you mean fd00::/8?"},
		{"10.0.0.1", "is an address, not a CIDR; did you mean 10.0.0.1/32?"},
		{"fd00::1", "is an address, not a CIDR; did you mean fd00::1/128?"},
		{"::ffff:10.0.0.1", "is an address, not a CIDR; did you mean 10.0.0.1/32?"},
		{"::ffff:10.0.0.0/104", "is an IPv4 prefix written as IPv6; did you mean 10.0.0.0/8?"},
		{"::ffff:10.0.1.24/120", "is an IPv4 prefix written as IPv6; did you mean 10.0.1.0/24?"},
		{"::ffff:0:0/96", "is an IPv4 prefix written as IPv6; did you mean 0.0.0.0/0?"},
		{"::ffff:10.0.0.0/8", "mixes an IPv4 address with an IPv6 prefix length; write the IPv4 prefix itself"},
		{"::ffff:10.0.0.0/95", "mixes an IPv4 address with an IPv6 prefix length; write the IPv4 prefix itself"},
		{" 10.0.0.0/8", `has white space around it; write "10.0.0.0/8"`},
		{"10.0.0.0/8\n", `has white space around it; write "10.0.0.0/8"`},
		{"10.0.0.0/33", notOne},
		{"10.0.0.0/-1", notOne},
		{"10.0.0.0/08", notOne},
		{"010.0.0.0/8", notOne},
		{"10.0.0/8", notOne},
		{"10.0.0.0/255.0.0.0", notOne},
		{"10.0.0.0/", notOne},
		{"/8", notOne},
		{"fd00::/129", notOne},
		{"fe80::%eth0/10", notOne},
		{"fe80::1%eth0", notOne},
		{"10.0.0.0/8,172.16.0.0/12", notOne},
		{"internal", notOne},
	} {
		p, err := policy.ParsePrefix(tt.in)
		wantError(t, tt.in, err, tt.want)
		if p.IsValid() {
			t.Errorf("ParsePrefix(%q) returned %v beside its error", tt.in, p)
		}
	}
}

// What is accepted has one spelling and is of one family; what is refused is
// refused in one short line, and what that proposes is accepted.
func FuzzParsePrefix(f *testing.F) {
	for _, s := range []string{
		"", " ", "10.0.0.0/8", "10.0.1.24/24", "fd00::/8", "::ffff:10.0.0.0/104", "::ffff:1.2.3.4", "1.2.3.4",
		"fe80::1%e/64", "10.0.0.0/8\x00", strings.Repeat(" ", 300) + strings.Repeat("é", 300), "\xff/8",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := policy.ParsePrefix(s)
		if err != nil {
			checkMessage(t, err)
			if _, proposal, ok := strings.Cut(err.Error(), "did you mean "); ok {
				if _, err := policy.ParsePrefix(strings.TrimSuffix(proposal, "?")); err != nil {
					t.Errorf("%q: the proposal %q: %v", s, proposal, err)
				}
			}
			return
		}
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() {
			t.Errorf("ParsePrefix(%q) = %v", s, p)
		}
		if again, err := policy.ParsePrefix(p.String()); err != nil || again != p {
			t.Errorf("ParsePrefix(%q) = %v, which reads back as %v, %v", s, p, again, err)
		}
	})
}

// checkMessage holds an error to one printable line, of which what was given
// takes 256 bytes at most.
func checkMessage(t *testing.T, err error) {
	t.Helper()
	const ownWords = 120
	text := err.Error()
	if len(text) > 256+ownWords {
		t.Errorf("the message has %d bytes: %s", len(text), text)
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("the message has characters that cannot be printed: %q", text)
	}
}
