// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestRequireAgentConfig checks that the first ADD fails with code 11 until the agent files are
// stored, and that its retry succeeds.
func TestRequireAgentConfig(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"requireAgentConfig": true})
		before := n.ruleset(t)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).
			want(t, 11, "requireAgentConfig: no policy of the agent files is stored yet", "start ip-masq-reconciler", "or remove the key")
		n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0).noWarnings(t)
		wantSame(t, "rules", n.ruleset(t), before)
		if s := n.load(t); len(s.Sources) > 0 {
			t.Errorf("documents: %+v", s.Sources)
		}
		n.storeSource(t, agentFilesSource(func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = prefixes("192.0.2.0/24") }))
		n.addAndCheck(t, conf).noWarnings(t)
		if rules := n.rules(t); !strings.Contains(rules, "192.0.2.0/24") {
			t.Errorf("rules without the policy of the agent files:\n%s", rules)
		}
		// It is stored, also if it can no longer be read.
		must(t, os.Truncate(filepath.Join(n.dataDir, "sources", filepath.Base(store.Open(n.dataDir).DocumentPath(policy.SourceID{Kind: policy.AgentFiles}))), 40))
		n.invoke(t, invocation{verb: "ADD", conf: conf, id: "damaged"}).want(t, 0)
	})
}

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

const earlierBoot = "00000000-0000-4000-8000-000000000000"

// endBoot changes the boot ID in the dataDir, so that it is from an earlier boot, and returns that of
// the running one.
func (n *node) endBoot(t *testing.T) (boot string) {
	t.Helper()
	boot = store.Open(n.dataDir).Boot()
	record, attachments := filepath.Join(n.dataDir, "record.json"), filepath.Join(n.dataDir, "attachments")
	text := strings.ReplaceAll(string(readFile(t, record)), boot, earlierBoot)
	must(t, firstOf(os.WriteFile(record, []byte(text), 0o600), os.Rename(filepath.Join(attachments, boot), filepath.Join(attachments, earlierBoot))))
	return boot
}
