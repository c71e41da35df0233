// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"math"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/pkg/document/yamldoc"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// unitedAlone is what a document states alone, or its mistakes.
func unitedAlone(doc []byte, d Dialect) (agentUnion, *agentDoc, []error) {
	a := parseAgentDoc("/etc/config/ip-masq-agent", doc, d, yamldoc.Decode)
	u := agentUnion{docs: []*agentDoc{a}}
	return u, a, u.unite()
}

func FuzzAgentFile(f *testing.F) {
	for _, doc := range []string{
		"", "# nothing\n", "nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - fd00::/8\nresyncInterval: 60s\nenableIPv6: true\n",
		"{\"NonMasqueradeCIDRs\": [\"10.0.0.0/8\", null], \"masqlinklocal\":\ttrue}", "a: &x [*x]\nb: *x", "a: 1\n---\nb: [}",
		"masqueradeCIDRs:\nmasqChain: ~\ncidrLimit: 0x10\nresyncInterval: 1e2\n? [a]\n: b\n<<: {c: 1}\n!!binary YQ==: !!float 1",
		"toPorts: |\n  1-7\nbackend: >-\n  auto\n\"\\u0000\": .nan\n'': 1\n\"\\u2028\": 2\nyes: no\n", "\xff\xfea\x00:\x00 \x001\x00", "--- !!map {}\n...\n%YAML 1.1\n---\n",
	} {
		f.Add([]byte(doc), false)
		f.Add([]byte(doc), true)
	}
	f.Fuzz(func(t *testing.T, doc []byte, v2 bool) {
		d := DialectV1
		if v2 {
			d = DialectV2
		}
		u, a, mistakes := unitedAlone(doc, d)
		for _, w := range a.warnings {
			checkMessage(t, w)
		}
		if len(a.warnings) > 64 {
			t.Errorf("%d warnings", len(a.warnings))
		}
		if _, _, again := unitedAlone(doc, d); !reflect.DeepEqual(texts(mistakes), texts(again)) {
			t.Errorf("the same document has other mistakes: %q and %q", texts(mistakes), texts(again))
		}
		if len(mistakes) > 0 {
			checkMessage(t, &DocumentError{Mistakes: mistakes})
			return
		}
		if s := u.statement; s.Validate(math.MaxInt) != nil || d == DialectV2 && s.NonMasqueradeCIDRs == nil {
			t.Errorf("accepts %+v", s)
		}
		if r := u.interval(); r != 0 && r < time.Second {
			t.Errorf("interval %s", r)
		}
		checkAgentsAgree(t, doc, u.statement)
	})
}

func texts(errs []error) []string {
	var all []string
	for _, err := range errs {
		all = append(all, err.Error())
	}
	return all
}

// checkAgentsAgree reads an accepted document as the agents do.
func checkAgentsAgree(t *testing.T, doc []byte, s policy.SourcePolicy) {
	t.Helper()
	var agent struct {
		NonMasqueradeCIDRs               []string
		MasqLinkLocal, MasqLinkLocalIPv6 bool
	}
	text := doc
	if !looksLikeJSON(doc) {
		var err error
		if text, err = yaml.YAMLToJSON(doc); err != nil {
			t.Fatalf("the agents refuse it: %v", err)
		}
	}
	if err := json.Unmarshal(text, &agent); err != nil {
		t.Fatalf("the agents refuse it: %v", err)
	}
	cidrs := map[string]bool{}
	for _, c := range agent.NonMasqueradeCIDRs {
		cidrs[c] = true
	}
	for _, p := range s.NonMasqueradeCIDRs {
		delete(cidrs, p.String())
	}
	// ParsePrefix takes one spelling of IPv4, and several of IPv6.
	for c := range cidrs {
		if !strings.Contains(c, ":") {
			t.Errorf("the agents exempt %s too", c)
		}
	}
	isTrue := func(b *bool) bool { return b != nil && *b }
	if isTrue(s.MasqLinkLocal) != agent.MasqLinkLocal || isTrue(s.MasqLinkLocalIPv6) != agent.MasqLinkLocalIPv6 {
		t.Errorf("the agents read %+v, and we %+v", agent, s)
	}
}

func FuzzSettings(f *testing.F) {
	for _, doc := range []string{
		"", wholeFile, "resync_interval = 60\nhealth_listen = '::1'\nagent.masqChain = ''\nconflist = {manage = 1}\n",
		"[agent]\nnonMasqueradeCIDRs = ['fd00::/8', 1, inf]\ncidrLimit = 0\n[agent.x]\ny = 1\n[[conflist]]\n",
		"agent = 1979-05-27\n\"agent.masqChain\" = 1\nmasqChain = 2\n[conflist]\n\"a\\u0000\" = nan\nnetwork = '/'\n",
	} {
		f.Add([]byte(doc), "agent.toPorts", "1-7")
		f.Add([]byte(doc), "agent.nonMasqueradeCIDRs", "10.0.0.0/8,\xff")
	}
	f.Fuzz(func(t *testing.T, doc []byte, key, text string) {
		if strings.Count(string(doc), ".")+strings.Count(string(doc), "{") > 200 {
			return // nesting takes the TOML decoder cubic time: a slow input is no finding
		}
		s := DefaultSettings()
		if err := s.parse("/etc/ip-masq/reconciler.toml", doc); err != nil {
			checkMessage(t, err)
			if diff := cmp.Diff(DefaultSettings(), s); diff != "" {
				t.Errorf("an error changed the settings:\n%s", diff)
			}
		}
		before := s
		if err := s.Set(key, text); err != nil {
			checkMessage(t, err)
			if diff := cmp.Diff(before, s, comparePrefixes); diff != "" {
				t.Errorf("an error changed the settings:\n%s", diff)
			}
		}
		if !filepath.IsAbs(s.DataDir) || !filepath.IsAbs(s.CNIConfDir) || s.ResyncInterval < time.Second {
			t.Errorf("accepts %+v", s)
		}
		// What a flag shows, it takes.
		var again Settings
		for i, field := range s.Fields() {
			if field.Value == "" {
				continue
			}
			if err := again.Set(field.Key, field.Value); err != nil {
				t.Errorf("%s shows %q, which is refused: %v", field.Key, field.Value, err)
			} else if got := again.Fields()[i].Value; got != field.Value {
				t.Errorf("%s shows %q for %q", field.Key, got, field.Value)
			}
		}
	})
}
