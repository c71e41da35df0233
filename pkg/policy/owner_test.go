// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestOwner(t *testing.T) {
	for _, tt := range []struct{ dir, want string }{
		{"/var/lib/cni/ip-masq", "ip-masq/1 keeps its state in /var/lib/cni/ip-masq"},
		{"/a_b.c-d/E9", "ip-masq/1 keeps its state in /a_b.c-d/E9"},
		{"/with space", "ip-masq/1 keeps its state in sha256:55e64fc8373463a23dde4f051897c1b53f895cd37ead790d95ccfe69b7c20c83"},
		{"/" + strings.Repeat("x", 79), "ip-masq/1 keeps its state in /" + strings.Repeat("x", 79)},
		{"/" + strings.Repeat("x", 80), "ip-masq/1 keeps its state in sha256:0415baaa7b9516d8c0cf8e51d59343f21aa48b0d3040a64c80ae467a2f13453b"},
	} {
		if got := policy.OwnedBy(tt.dir).Comment(); got != tt.want {
			t.Errorf("OwnedBy(%q): %s, want %s", tt.dir, got, tt.want)
		}
	}
	if got := (policy.Owner{}).Comment(); got != "" {
		t.Errorf("the comment of the zero owner is %q", got)
	}
}

func TestParseOwner(t *testing.T) {
	for _, tt := range []struct {
		comment string
		want    policy.Owner
	}{
		{"ip-masq/1 keeps its state in /state", policy.Owner{Schema: 1, DataDir: "/state"}},
		{"ip-masq/27 keeps its state in /state", policy.Owner{Schema: 27, DataDir: "/state"}},
		{"", policy.Owner{}},
		{"ip-masq/", policy.Owner{}},
		{"ip-masq/1", policy.Owner{}},
		{"ip-masq/0 keeps its state in /state", policy.Owner{}},
		{"ip-masq/-1 keeps its state in /state", policy.Owner{}},
		{"ip-masq/x keeps its state in /state", policy.Owner{}},
		{"ip-masq/99999999999999999999 keeps its state in /state", policy.Owner{}},
		{"1 keeps its state in /state", policy.Owner{}},
		{" ip-masq/1 keeps its state in /state", policy.Owner{}},
		{"ip-masq-agent: local traffic is not subject to MASQUERADE", policy.Owner{}},
	} {
		if got := policy.ParseOwner(tt.comment); got != tt.want {
			t.Errorf("ParseOwner(%q) = %+v, want %+v", tt.comment, got, tt.want)
		}
	}
}

func genDir() *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.StringMatching(`/[a-zA-Z0-9_./-]{0,120}`),
		rapid.StringMatching(`/[a-z "'\\`+"\t\n"+`$;#%=:]{0,20}`),
		rapid.SampledFrom([]string{"", "/x keeps its state in /y", "sha256:x", "/ip-masq/1 keeps its state in /z", "/é", "/\x00", "/\xff", "/a\u2028b"}),
		rapid.String(),
	)
}

// Whatever a path is called, its owner is read back from the comment, which
// either backend can hold and which needs no quoting; other paths are others.
func TestOwnerRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir := genDir().Draw(t, "dir")
		o := policy.OwnedBy(dir)
		comment := o.Comment()
		if got := policy.ParseOwner(comment); got != o {
			t.Fatalf("OwnedBy(%q): %q reads back as %+v, want %+v", dir, comment, got, o)
		}
		const most = 127 // NFTNL_UDATA_COMMENT_MAXLEN 128 with its end; xt_comment has 256
		if len(comment) > most || strings.ContainsFunc(comment, func(r rune) bool { return r < ' ' || r > '~' || strings.ContainsRune("\"\\'`$", r) }) {
			t.Fatalf("OwnedBy(%q): the comment has %d bytes: %q", dir, len(comment), comment)
		}
		if other := genDir().Draw(t, "other"); (policy.OwnedBy(other) == o) != (other == dir) {
			t.Fatalf("OwnedBy(%q) and OwnedBy(%q) are %+v", dir, other, o)
		}
	})
}

// A comment has an owner or none, and what was read is written so that it
// reads the same.
func FuzzParseOwner(f *testing.F) {
	for _, s := range []string{
		"", "ip-masq/1 keeps its state in /state", "ip-masq/1 keeps its state in ", "ip-masq/1", "ip-masq/+1 keeps its state in x",
		"ip-masq/1 keeps its state in a keeps its state in b", "ip-masq/01 keeps its state in \x00",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, comment string) {
		o := policy.ParseOwner(comment)
		if again := policy.ParseOwner(o.Comment()); again != o {
			t.Errorf("ParseOwner(%q) = %+v, which reads back as %+v", comment, o, again)
		}
		if o != (policy.Owner{}) && (o.Schema < 1 || !strings.HasPrefix(comment, "ip-masq/") || !strings.HasSuffix(comment, o.DataDir)) {
			t.Errorf("ParseOwner(%q) = %+v", comment, o)
		}
	})
}

// A newer version may say something else behind its number; that it is newer
// must still be seen.
func TestParseOwnerOfANewerForm(t *testing.T) {
	newer := strconv.Itoa(policy.RulesSchema + 1)
	for comment, want := range map[string]policy.Owner{
		"ip-masq/" + newer:                                   {Schema: policy.RulesSchema + 1},
		"ip-masq/" + newer + " lives elsewhere now":          {Schema: policy.RulesSchema + 1},
		"ip-masq/" + newer + " keeps its state in /var/lib":  {Schema: policy.RulesSchema + 1, DataDir: "/var/lib"},
		"ip-masq/1 lives elsewhere now":                      {},
		"ip-masq/1":                                          {},
		"ip-masq/x keeps its state in /var/lib/cni/ip-masq":  {},
		"ip-masq-agent: local traffic is not subject to ...": {},
	} {
		if got := policy.ParseOwner(comment); got != want {
			t.Errorf("ParseOwner(%q) = %+v, want %+v", comment, got, want)
		}
	}
}
