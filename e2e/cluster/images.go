// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
)

// pack makes an archive of an image for this machine.
func pack(image oci.Image) ([]byte, error) {
	image.Arch = runtime.GOARCH
	var archive bytes.Buffer
	if err := oci.Write(&archive, image); err != nil {
		return nil, fmt.Errorf("pack image %s: %w", image.Name, err)
	}
	return archive.Bytes(), nil
}

// KubectlImage has kubectl and a shell, as an administrator would provide it, with the tag 1.
const KubectlImage = "ip-masq.test/kubectl"

// ImportKubectl imports KubectlImage on every node.
func (c *Cluster) ImportKubectl(ctx context.Context) error {
	kubectl, err := os.ReadFile(filepath.Join(c.options.Binaries.Kubernetes, "kubectl"))
	if err != nil {
		return fmt.Errorf("read kubectl: %w", err)
	}
	shell, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return fmt.Errorf("read busybox: %w (the Debian package busybox-static has it)", err)
	}
	archive, err := pack(oci.Image{
		Name: KubectlImage + ":1",
		Layers: [][]oci.File{{
			{Name: "bin/kubectl", Mode: 0o755, Data: kubectl},
			{Name: "bin/busybox", Mode: 0o755, Data: shell},
			{Name: "bin/sh", Mode: 0o777 | fs.ModeSymlink, Link: "busybox"},
			{Name: "bin/sleep", Mode: 0o777 | fs.ModeSymlink, Link: "busybox"},
			{Name: "tmp", Mode: 0o777 | fs.ModeDir},
		}},
		Env: []string{"PATH=/bin"},
	})
	if err != nil {
		return err
	}
	for _, n := range c.Nodes {
		if err := n.Runtime.Import(ctx, archive); err != nil {
			return err
		}
	}
	return nil
}
