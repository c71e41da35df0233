// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// readAlone returns what a document asks for by itself, or its mistakes.
func readAlone(text []byte, dialect config.Dialect) (*document, policy.Source, []error) {
	d := file{path: "/etc/config/ip-masq-agent", text: text}.parse(dialect)
	s, mistakes := merge([]*document{d})
	return d, s, mistakes
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
		d := config.DialectV1
		if v2 {
			d = config.DialectV2
		}
		a, source, mistakes := readAlone(doc, d)
		for _, w := range a.warnings {
			policytest.CheckMessage(t, errors.New(w))
		}
		if len(a.warnings) > 64 {
			t.Errorf("%d warnings", len(a.warnings))
		}
		if _, _, again := readAlone(doc, d); !reflect.DeepEqual(texts(mistakes), texts(again)) {
			t.Errorf("the same document has other mistakes: %q and %q", texts(mistakes), texts(again))
		}
		if len(mistakes) > 0 {
			policytest.CheckMessage(t, &config.DocumentError{Mistakes: mistakes})
			return
		}
		stated := source.Policies()[0]
		if source.Validate(math.MaxInt) != nil || d == config.DialectV2 && stated.NonMasqueradeCIDRs == nil {
			t.Errorf("accepts %+v", source)
		}
		if r := a.resync; r != 0 && r < time.Second {
			t.Errorf("interval %s", r)
		}
		checkAgentsAgree(t, doc, stated)
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
	if !json.Valid(doc) || !bytes.HasPrefix(bytes.TrimSpace(doc), []byte("{")) {
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
