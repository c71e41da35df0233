// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// newerDocument returns a document of the next version, and what errors say of its version.
func newerDocument() (text, schema string) {
	return fmt.Sprintf(`{"schema": %d, "future": {"x": [1e999]}, "policy": null}`, store.Schema()+1), fmt.Sprintf("schema %d", store.Schema()+1)
}

// TestCommandsWithUnreadableDocuments checks the commands while documents are of a newer version or
// damaged, so that the desired state is unknown. Each command reports that, calls no rule
// unexpected, and advises neither to remove rules nor to run `once`, which would do nothing.
func TestCommandsWithUnreadableDocuments(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.addAndCheck(t, n.conf(t, "podnet", object{"masqChain": "ONE", "sourceCIDRs": []string{"10.1.0.0/16"}}))
		n.addAndCheck(t, n.conf(t, "othernet", object{"masqChain": "TWO", "sourceCIDRs": []string{"10.2.0.0/16"}}))
		one, two, record := n.document(t, "podnet"), n.document(t, "othernet"), filepath.Join(n.dataDir, "record.json")
		newer, schema := newerDocument()
		for _, c := range []struct {
			name, text string
			files      []string
			says       []string
		}{
			{"one newer document", newer, []string{one}, []string{one, "newer version", schema}},
			{"all documents newer", newer, []string{one, two}, []string{one, "newer version", schema}},
			{"the record too", newer, []string{one, two, record}, []string{one, "newer version", schema}},
			{"a damaged document that no source writes again", "{", []string{one}, []string{one, "no conflist or agent file says what it held"}},
		} {
			t.Run(c.name, func(t *testing.T) {
				was := map[string][]byte{}
				for _, file := range c.files {
					was[file] = readFile(t, file)
					must(t, os.WriteFile(file, []byte(c.text), 0o600))
				}
				defer func() {
					for file, text := range was {
						must(t, os.WriteFile(file, text, 0o600))
					}
				}()
				before := n.ruleset(t)
				for _, q := range []struct {
					args []string
					code int
				}{
					{[]string{"check"}, 1},
					{[]string{"check", "-o", "json"}, 1},
					{[]string{"explain", "8.8.8.8", "--from", "10.1.0.9"}, 0},
					{[]string{"explain", "10.9.9.9", "--from", "10.1.0.9"}, 0},
					{[]string{"explain", "8.8.8.8", "-o", "json"}, 0},
					{[]string{"render"}, 1},
					{[]string{"render", "--backend", "nftables"}, 1},
					{[]string{"doctor"}, 0},
					{[]string{"doctor", "-o", "json"}, 0},
				} {
					stdout, stderr, code := n.reconciler(t, q.args...)
					said := stdout + stderr
					if code != q.code {
						t.Errorf("%v: exit code %d, want %d", q.args, code, q.code)
					}
					for _, s := range c.says {
						if !strings.Contains(said, s) {
							t.Errorf("%v does not say %q:\n%s", q.args, s, said)
						}
					}
					for _, s := range []string{"reconciler once", "wanted", "unexpected\": true", "unexpected chain", "no source asks", "remove", "missing rule", "masquerade destinations", "wants"} {
						if s == "remove" && c.text == "{" {
							continue // a damaged document may be removed
						}
						if strings.Contains(said, s) {
							t.Errorf("%v says %q:\n%s", q.args, s, said)
						}
					}
				}
				wantSame(t, "rules", n.ruleset(t), before)
			})
		}
	})
}

// TestDamagedDocumentBesideAThirdPartyRule: a rule of another program that cannot be decoded fails no ADD while documents are
// damaged, so that their networks write them again.
func TestDamagedDocumentBesideAThirdPartyRule(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		networks := []string{"one", "two"}
		for _, name := range networks {
			n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, name, nil), id: name}).want(t, 0)
		}
		for _, file := range topology.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.json")))(t) {
			must(t, os.Truncate(file, 40))
		}
		if n.backend.variant == "" {
			n.tool(t, "nft", "add", "rule", "ip", "ip-masq", "masq-IP-MASQ-AGENT", "tcp", "dport", "80", "log")
		} else {
			n.tool(t, "iptables-"+n.backend.variant, "-t", "nat", "-A", "IP-MASQ-AGENT", "-p", "tcp", "--dport", "80", "-j", "LOG")
		}
		for _, name := range append(networks, "three") {
			conf := n.conf(t, name, nil)
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: name + "-again"}).want(t, 0)
		}
		n.addAndCheck(t, n.conf(t, "one", nil)) // it has removed the rule
	})
}
