// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"fmt"
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
