// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// wantNoReconciliation fails the test if a reconciler changes anything on a node with rules or
// documents of a newer version: the running one, or once and check. It checks that each reports
// the reason and that the plugin's verbs succeed.
func (n *node) wantNoReconciliation(t *testing.T, d *daemon, conf string, says ...string) {
	t.Helper()
	before, generation, logged := n.snapshot(t), n.generation(t), d.log()
	same := func(who string) {
		t.Helper()
		n.unchanged(t, before)
		wantSame(t, "generation by "+who, n.generation(t), generation)
	}
	earlier := ""
	for i := range 3 {
		syncs := d.metric(t, "reconciles_total")
		d.signal(t, syscall.SIGHUP)
		d.until(t, "sync", func() bool { return d.metric(t, "reconciles_total") > syncs })
		d.untilUnready(t, says...)
		if i == 1 {
			earlier = d.log()
		}
	}
	wantSame(t, "the log of a sync without changes", strings.TrimPrefix(d.log(), earlier), "")
	if strings.Contains(strings.TrimPrefix(earlier, logged), "source updated") {
		t.Errorf("the log reports an updated source:\n%s", earlier)
	}
	same("run")
	for _, command := range []string{"once", "check"} {
		n.wantSays(t, 1, says, command)
		same(command)
	}
	for _, verb := range []string{"ADD", "CHECK", "STATUS", "DEL", "ADD"} {
		n.invoke(t, invocation{verb: verb, conf: conf}).want(t, 0)
	}
	same("the plugin")
}

// TestNewerDocument checks that the reconciler repairs nothing while a document of a newer version
// makes the desired state unknown, and works again once the document is replaced.
func TestNewerDocument(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		n.conflist(t, "podnet", nil)
		n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [1.2.3.0/24]\n")
		n.addAndCheck(t, conf)
		n.addAndCheck(t, n.conf(t, "othernet", nil))
		d := n.startReconciler(t, "--resync-interval", "1h").untilReady(t)
		n.addAndCheck(t, conf)
		newer, schema := newerDocument()
		for name, path := range map[string]string{
			"document of a network":         n.document(t, "podnet"),
			"document of another":           n.document(t, "othernet"),
			"document of the agent files":   n.sourceDocument(t, `"kind":"agent-files"`),
			"record":                        filepath.Join(n.dataDir, "record.json"),
			"document of an unknown source": filepath.Join(n.dataDir, "sources", strings.Repeat("0", 64)+".json"),
		} {
			if n.backend.variant != "" && name != "document of another" && name != "record" {
				continue // the other cases do not depend on the backend
			}
			outer := t
			t.Run(name, func(t *testing.T) {
				was, missing := os.ReadFile(path)
				must(t, os.WriteFile(path, []byte(newer), 0o600))
				n.alter(t, "-D IP-MASQ-AGENT 1", "delete element ip ip-masq exempt-IP-MASQ-AGENT { 169.254.0.0/16 }")
				says := []string{path, schema, "a newer version", "install"}
				n.wantNoReconciliation(t, d, conf, says...)
				// Changed sources are not applied either.
				rules := n.ruleset(t)
				n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [20.0.0.0/8]\n")
				n.wantNoReconciliation(t, d, conf, says...)
				// A newly started reconciler does not apply them either.
				d.stop(t)
				d = n.startReconciler(outer, "--resync-interval", "1h")
				n.wantNoReconciliation(t, d, conf, says...)
				wantSame(t, "rules", n.ruleset(t), rules)
				wantSame(t, "the document", string(readFile(t, path)), newer)
				n.wantSays(t, 1, nil, "cleanup")

				if missing != nil {
					must(t, os.Remove(path))
				} else {
					must(t, os.WriteFile(path, was, 0o600))
				}
				d.signal(t, syscall.SIGHUP)
				d.untilReady(t)
				n.addAndCheck(t, conf).noWarnings(t)
				wantText(t, "rules with the policy of the agent files", n.rules(t), "20.0.0.0/8")
				n.wantSays(t, 0, nil, "check")
			})
		}
	})
}

// sourceDocument returns the path of the only document that contains a text.
func (n *node) sourceDocument(t *testing.T, text string) string {
	t.Helper()
	paths := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.json")))(t)
	at := slices.IndexFunc(paths, func(p string) bool { return strings.Contains(string(readFile(t, p)), text) })
	if at < 0 {
		t.Fatalf("no document with %s among %v", text, paths)
	}
	return paths[at]
}

// TestNewerRulesWithReconciler checks that the reconciler does not change a chain in the backend
// of a newer version.
func TestNewerRulesWithReconciler(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", nil)
		conf := n.conf(t, "podnet", nil)
		all := onlyPod(n.pod(t, "podnet"))
		n.addAndCheck(t, conf)
		d := n.startReconciler(t, "--resync-interval", "1h").untilReady(t)
		comment := newerOwner(n.dataDir).Comment()
		if n.backend.variant == "" {
			n.feed(t, "flush chain ip ip-masq masq-IP-MASQ-AGENT; add rule ip ip-masq masq-IP-MASQ-AGENT ip daddr 1.2.3.0/24 counter return; "+
				"add rule ip ip-masq masq-IP-MASQ-AGENT counter masquerade comment \""+comment+"\"", "nft", "-f", "-")
		} else {
			n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n-A IP-MASQ-AGENT -d 1.2.3.0/24 -m addrtype --dst-type UNICAST -j RETURN\n"+
				"-A IP-MASQ-AGENT -m comment --comment \""+comment+"\" -j MASQUERADE\nCOMMIT\n", "iptables-"+n.backend.variant+"-restore", "--noflush")
		}
		d.signal(t, syscall.SIGHUP) // iptables-legacy has no events
		says := []string{"chain IP-MASQ-AGENT (ipv4)", "written by a newer version of ip-masq", "form 2"}
		serves := func() {
			t.Helper()
			all.verdicts(t, n, false, map[string]string{"pod": "1.2.3.4"})
			all.verdicts(t, n, true, map[string]string{"pod": "10.8.0.1 1.2.4.1"})
		}
		d.untilUnready(t, says...)
		n.wantNoReconciliation(t, d, conf, says...)
		serves()
		// The rules of a changed source cannot be written.
		rules, logged := n.ruleset(t), d.log()
		n.conflist(t, "podnet", object{"nonMasqueradeCIDRs": []string{"20.0.0.0/8"}})
		d.untilUnready(t, append(says, `network "podnet"`, "cannot be applied")...)
		if strings.Contains(strings.TrimPrefix(d.log(), logged), "source updated") {
			t.Errorf("the log reports an updated source that is not in force:\n%s", d.log())
		}
		d.stop(t)
		d = n.startReconciler(t, "--resync-interval", "1h")
		d.untilUnready(t, says...)
		n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"20.0.0.0/8"}})}).want(t, 0, says...)
		wantSame(t, "rules", n.ruleset(t), rules)
		serves()
		// The older version works again once the rules of the newer one are removed.
		n.flush(t)
		d.signal(t, syscall.SIGHUP)
		d.untilReady(t)
		all.verdicts(t, n, false, map[string]string{"pod": "20.1.1.1"})
		all.verdicts(t, n, true, map[string]string{"pod": "1.2.3.4"})
	})
}

// TestNewerRulesOfAnotherChain checks that a newer version's chain of one network does not prevent
// repairs of another network's chain, unless both are in the tables of ip-masq, which may contain
// more from the newer version.
func TestNewerRulesOfAnotherChain(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		n.conflist(t, "podnet", nil)
		n.conflist(t, "othernet", object{"masqChain": "OTHER"})
		n.addAndCheck(t, conf)
		d := n.startReconciler(t, "--resync-interval", "1h").untilReady(t)
		newer := newerOwner(n.dataDir)
		n.alterComment(t, "OTHER", newer.Comment())
		says := []string{"chain OTHER (ipv4)", "written by a newer version of ip-masq", fmt.Sprintf("form %d", newer.Schema)}
		d.signal(t, syscall.SIGHUP) // iptables-legacy has no events
		d.untilUnready(t, says...)  // a sync that is about to write OTHER would repair the other chain, too
		n.alter(t, "-D IP-MASQ-AGENT 1", "delete element ip ip-masq exempt-IP-MASQ-AGENT { 169.254.0.0/16 }")
		if n.backend.variant == "" {
			n.wantNoReconciliation(t, d, conf, says...)
			return
		}
		theirs := func() (lines []string) {
			for line := range strings.Lines(n.ruleset(t)) {
				if strings.Contains(line, "OTHER") {
					lines = append(lines, line)
				}
			}
			return lines
		}
		before := theirs()
		d.signal(t, syscall.SIGHUP)
		d.untilUnready(t, says...)
		d.until(t, "repair", func() bool { return strings.Contains(n.ruleset(t), "-A IP-MASQ-AGENT -d 169.254.0.0/16 ") })
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
		d.signal(t, syscall.SIGHUP)
		d.untilUnready(t, says...)
		if now := theirs(); !slices.Equal(now, before) || len(now) == 0 {
			t.Errorf("rules changed:\n%q\nwere:\n%q", now, before)
		}
	})
}

// alterComment replaces the rules of a chain by one masquerade rule with the comment.
func (n *node) alterComment(t *testing.T, chain, comment string) {
	t.Helper()
	if n.backend.variant == "" {
		n.feed(t, "flush chain ip ip-masq masq-"+chain+"; add rule ip ip-masq masq-"+chain+" counter masquerade comment \""+comment+"\"", "nft", "-f", "-")
		return
	}
	n.feed(t, "*nat\n:"+chain+" - [0:0]\n-A "+chain+" -m comment --comment \""+comment+"\" -j MASQUERADE\nCOMMIT\n",
		"iptables-"+n.backend.variant+"-restore", "--noflush")
}

// newerOwner is the owner of a chain that a newer version wrote.
func newerOwner(dataDir string) policy.Owner {
	return policy.Owner{Schema: policy.RulesSchema + 1, DataDir: dataDir}
}

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
					wantText(t, strings.Join(q.args, " "), said, c.says...)
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
		must(t, os.WriteFile(one, []byte(newer), 0o600))
		n.flush(t)
		conf, says := n.conf(t, "podnet", object{"masqChain": "ONE"}), "chain ONE does not exist, and is not created without all documents"
		n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, says)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, says)
		n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0, one, "a newer version")
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
		documents := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.json")))(t)
		for _, file := range documents {
			must(t, os.Truncate(file, 40))
		}
		if n.backend.variant == "" {
			n.tool(t, "nft", "add", "rule", "ip", "ip-masq", "masq-IP-MASQ-AGENT", "tcp", "dport", "80", "log")
		} else {
			n.tool(t, "iptables-"+n.backend.variant, "-t", "nat", "-A", "IP-MASQ-AGENT", "-p", "tcp", "--dport", "80", "-j", "LOG")
		}
		check := n.invoke(t, invocation{verb: "CHECK", conf: n.conf(t, "one", nil), id: "one"}).want(t, 101)
		wantText(t, "what CHECK warns of", check.stderr, documents...)
		n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "three", nil)}).want(t, 0, documents...)
		for _, name := range append(networks, "three") {
			conf := n.conf(t, name, nil)
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: name + "-again"}).want(t, 0)
		}
		n.addAndCheck(t, n.conf(t, "one", nil)) // it has removed the rule
	})
}
